"""The settings of a fine-tuning set, all that decides its tokens, and the folder of the user's cache.

The folder is that of the XDG Base Directory Specification.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from patch.config.choices import LongSamples
from patch.config.data_spec import parse_columns
from patch.config.schema import DataConfig
from patch.data.formats import FormatOptions
from patch.data.rendering import RenderOptions
from patch.data.tokenizer import special_tokens
from patch.device import usable_cores
from patch.storage.places import StrPath

TOKEN_RULES = 5
"""The version of the rules by which rows become tokens: formats, rendering, encoding, cuts. Raise it with
every change of them that changes a token or a mask, so that older entries are not used."""

_PACKAGES = ("jinja2", "tokenizers", "transformers")
"""Their versions are part of the key: they render and encode."""
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
    pairs: bool = False
    """Each row has a preferred and another answer, and gives two sequences."""
    render: RenderOptions = field(default_factory=RenderOptions)
    """Which turns are learned, and what special tokens in the rows mean."""
    long_samples: LongSamples = "cut-end"
    """How a conversation is treated that is longer than a sample (see cuts.py)."""
    max_dropped_share: float = 0.1
    """Largest share of rows that may be dropped."""
    num_workers: int = 1
    """Processes that render and encode."""
    cache_dir: StrPath | None = None
    """Folder of the token cache; None: the tokens are kept in memory."""


def sft_options(data: DataConfig, fallback_cache: Path, *, pairs: bool) -> SftOptions:
    """The options of a run.

    Args:
        data: the run's settings.
        pairs: whether its rows are pairs.
        fallback_cache: the folder of the token cache if none is chosen and the user's own cannot be written.

    Raises:
        ConfigError: the map of columns cannot be read.
    """
    return SftOptions(
        format=FormatOptions(parse_columns(data.columns), data.alpaca_input_join),
        pairs=pairs,
        render=RenderOptions(data.train_on, data.allow_special_tokens),
        long_samples=data.long_samples,
        max_dropped_share=data.max_dropped_share,
        num_workers=data.data_workers or min(_MOST_WORKERS, usable_cores()),
        cache_dir=user_cache(fallback_cache) if data.cache_dir is None else Path(data.cache_dir),
    )


def origin_of(tokenizer: PreTrainedTokenizerBase, options: SftOptions, length: int) -> dict[str, str]:
    """All that decides the tokens of a set, beside its rows: a name for messages, and its value or hash.

    Args:
        tokenizer: the tokenizer with its chat template.
        options: how rows become samples.
        length: tokens of a sample.
    """
    backend = tokenizer.backend_tokenizer.to_str().encode()
    named_tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return {
        "the rules of this program": str(TOKEN_RULES),
        **{package: version(package) for package in _PACKAGES},
        **({"the objective": "pairs"} if options.pairs else {}),
        "the settings of the data": _hash(
            [asdict(options.format), asdict(options.render), options.long_samples, length]
        ),
        "the chat template": _hash(tokenizer.chat_template),
        "the tokenizer": _hash([sha256(backend).hexdigest(), special_tokens(tokenizer), named_tokens]),
    }


def set_key(files: Sequence[tuple[str, str]], origin: dict[str, str]) -> str:
    """A hash of everything that decides the tokens of a set, in 64 hexadecimal digits.

    Args:
        files: for each file, its name in the report and the hash of its content.
        origin: of `origin_of`.
    """
    return _hash([files, origin])


def _hash(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
