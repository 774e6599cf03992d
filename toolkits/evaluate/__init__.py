"""Scores of tasks without a run."""
