"""Shows training data: rows as tokens, learned and not learned, and figures of the sets; see README.md."""

from patch.data.preview.preview import Preview, show_data
from patch.data.preview.terminal import terminal

__all__ = ["Preview", "show_data", "terminal"]
