"""Proof of a run before it starts: its flags, shrunk, against one process."""
