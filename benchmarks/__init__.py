"""Benchmarks of graphopt: memory before and after every pass, speed, compile time, against peers."""
