"""The features of a run, their conflicts, and its kernels. Imports neither torch nor megatron."""
