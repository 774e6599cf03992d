"""Checks of files, data and machine before a run starts. Imports neither torch nor megatron."""
