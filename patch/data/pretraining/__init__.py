"""Pre-training sets: .bin/.idx files, written and read. Its modules import megatron-core."""
