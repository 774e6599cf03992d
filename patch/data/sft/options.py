"""What a user says about a fine-tuning set."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from patch.config.choices import LongSamples
from patch.data.formats import FormatOptions
from patch.data.rendering import RenderOptions


@dataclass(frozen=True, slots=True)
class SftOptions:
    """How rows become samples, and what the work may use."""

    format: FormatOptions = field(default_factory=FormatOptions)
    """The keys of the rows."""
    render: RenderOptions = field(default_factory=RenderOptions)
    """Which turns are learned, and what special tokens in the rows mean."""
    long_samples: LongSamples = "cut-end"
    """What becomes of a conversation that is longer than a sample (see cuts.py)."""
    max_dropped_share: float = 0.1
    """Largest share of rows that may be dropped."""
    num_workers: int = 1
    """Processes that render and encode."""
    cache_dir: Path | None = None
    """Folder of the token cache; None: the tokens are kept in memory."""
