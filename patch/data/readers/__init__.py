"""Files become rows: JSON objects with the place they came from."""
