"""The intermediate representation: a functional ATen graph with a signature, and analyses over it."""
