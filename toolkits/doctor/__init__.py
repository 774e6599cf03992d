"""What a machine has, can do and lacks, in small checks: `llama-patch doctor`."""
