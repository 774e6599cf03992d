"""Conversations become text and tokens, of which the assistant's words are learned."""
