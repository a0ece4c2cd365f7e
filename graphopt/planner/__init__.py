"""Decides what is saved, computed again or offloaded between forward and backward, against the peak of the step."""
