"""Seconds of a step on a machine that may not be here, in closed form."""
