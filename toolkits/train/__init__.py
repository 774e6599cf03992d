"""Command line of a training run."""
