"""Rendering of conversations as text and tokens; the assistant's words are trained. See README.md."""
