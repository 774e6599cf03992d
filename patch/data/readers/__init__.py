"""Files become rows: JSON objects with the place they came from."""

from patch.data.readers.rows import Row, SetReader, read_rows, shown_progress

__all__ = ["Row", "SetReader", "read_rows", "shown_progress"]
