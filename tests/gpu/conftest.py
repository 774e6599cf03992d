"""The end-to-end tests' small model and data, for GPUs too."""

from end_to_end.conftest import office

__all__ = ["office"]
