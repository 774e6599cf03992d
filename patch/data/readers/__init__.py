"""Readers of files: rows are JSON objects with their place in the file."""

from patch.data.readers.rows import Row, SetReader, read_rows, shown_progress

__all__ = ["Row", "SetReader", "read_rows", "shown_progress"]
