"""graphopt: a compiler for training steps."""

from graphopt.version import __version__

__all__ = ["__version__"]
