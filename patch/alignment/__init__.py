"""Is the difference between a checkpoint and its Hugging Face folder normal? See README.md."""

from patch.alignment.report import Report, verify
from patch.alignment.verdict import Verdict

__all__ = ["Report", "Verdict", "verify"]
