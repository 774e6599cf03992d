"""The rules of a run that need arithmetic only, by subject. Imports neither torch nor megatron."""
