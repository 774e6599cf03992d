"""Files become rows: JSON objects with the place they came from."""

from patch.data.readers.rows import Row, read_rows

__all__ = ["Row", "read_rows"]
