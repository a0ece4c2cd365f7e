"""Optimizer state in far memory: where it lies, who has it there, and the engine that updates it range by range."""
