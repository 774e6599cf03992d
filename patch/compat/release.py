"""The installed release of megatron-core."""

from importlib.metadata import version

RELEASE = tuple(map(int, version("megatron-core").split(".")[:2]))
"""(0, 16) for 0.16.1."""
