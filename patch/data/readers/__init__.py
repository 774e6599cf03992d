"""Readers of files: rows are JSON objects with their place in the file."""
