"""Kernels: each with its formula, its reference in plain torch, and the fast forms that give the reference's bits."""
