"""Discrete-event simulation of a training step."""
