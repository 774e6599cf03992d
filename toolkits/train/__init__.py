"""The training run's command line."""
