"""Is the difference between a checkpoint and its Hugging Face folder normal? See README.md."""
