"""Preview of training data: rows as tokens, trained or not, and figures of the data sets; see README.md."""

from patch.data.preview.preview import Preview, show_data
from patch.data.preview.terminal import terminal

__all__ = ["Preview", "show_data", "terminal"]
