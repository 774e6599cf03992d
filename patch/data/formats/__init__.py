"""Rows become conversations in the form that chat templates take."""
