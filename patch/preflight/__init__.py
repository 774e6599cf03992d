"""What a run asks of the world before it starts. Imports neither torch nor megatron."""
