"""Benchmarks of graphopt: memory before and after every pass, speed and compile time, against eager and torch.compile."""
