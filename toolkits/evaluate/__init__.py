"""Scores of evaluation tasks without a training run: `llama-patch evaluate`."""
