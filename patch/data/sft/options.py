"""What a user says about a fine-tuning set; the folder of the user's cache, by the XDG Base Directory
Specification."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from patch.config.choices import LongSamples
from patch.config.schema import DataConfig
from patch.data.formats import FormatOptions, format_options
from patch.data.rendering import RenderOptions
from patch.device import usable_cores
from patch.storage.places import StrPath

_NAME = "llama-megatron-patch"


def user_cache(fallback: Path) -> Path:
    """This project's folder in XDG_CACHE_HOME or ~/.cache, which is created.

    Args:
        fallback: the folder to use where there is no home, or one that cannot be written.
    """
    home = os.path.expanduser("~")
    chosen = os.environ.get("XDG_CACHE_HOME") or (os.path.join(home, ".cache") if home != "~" else "")
    if not os.path.isabs(chosen):  # the specification: other values are to be ignored
        return fallback
    folder = Path(chosen, _NAME)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return fallback
    return folder if os.access(folder, os.W_OK | os.X_OK) else fallback


_MOST_WORKERS = 32
"""The default's limit: one process reads the rows for all workers."""


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
    cache_dir: StrPath | None = None
    """Folder of the token cache; None: the tokens are kept in memory."""


def sft_options(data: DataConfig, fallback_cache: Path) -> SftOptions:
    """The options of a run.

    Args:
        data: the run's settings.
        fallback_cache: the folder of the token cache if none is chosen and the user's own cannot be written.
    """
    return SftOptions(
        format=format_options(data),
        render=RenderOptions(data.train_on, data.allow_special_tokens),
        long_samples=data.long_samples,
        max_dropped_share=data.max_dropped_share,
        num_workers=data.data_workers or min(_MOST_WORKERS, usable_cores()),
        cache_dir=user_cache(fallback_cache) if data.cache_dir is None else Path(data.cache_dir),
    )
