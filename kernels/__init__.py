"""Kernels: one a file. None is needed yet; the first arrive with the block-INT8 optimizers."""
