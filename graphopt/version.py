"""The version of graphopt."""

__version__ = "0.1.0"
