"""Planning, emitting and running a program."""
