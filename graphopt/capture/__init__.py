"""Capturing a model: export, differentiation and the update, with every private torch import."""
