"""The training run's command line."""

RESOLVED = "--resolved-run"
"""Before the file from which workers read what their launcher has resolved."""
