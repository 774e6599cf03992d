"""Command line of a training run."""

RESOLVED = "--resolved-run"
"""Flag before the file from which workers read the run that their launcher has resolved."""
