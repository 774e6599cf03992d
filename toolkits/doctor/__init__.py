"""What a machine has, can do and lacks, in small checks: `python -m toolkits.doctor`."""
