"""Arithmetic that the plan, the model and the optimizer share. Imports neither torch nor megatron."""
