"""Operators of graphopt's own that programs may call beside ATen's; importing a module of this part registers them."""
