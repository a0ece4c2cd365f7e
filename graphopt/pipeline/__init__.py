"""Passes as values, the pipeline that runs and checks them, and what it writes down."""
