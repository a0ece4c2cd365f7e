"""Kernels: each with its formula, its reference in plain torch, and the fast forms that give the reference's bits."""

from graphopt.kernels.cpu_library import cpu_path

__all__ = ["cpu_path"]
