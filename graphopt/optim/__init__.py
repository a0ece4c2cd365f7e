"""Optimizers as values: what to update, by which rule, with which options."""
