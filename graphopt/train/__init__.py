"""Training helpers: the demo model and its data."""
