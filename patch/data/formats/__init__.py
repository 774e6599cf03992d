"""Conversion of rows to conversations in the form that chat templates take; `read_row` is the entry."""
