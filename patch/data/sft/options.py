"""Settings of a fine-tuning set, all that decides its tokens, and the user's (XDG) cache folder."""

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

from patch.config.choices import LongSamples, RowKind
from patch.config.data_spec import parse_columns
from patch.config.schema import DataConfig
from patch.data.formats.turns import FormatOptions
from patch.data.rendering.spans import RenderOptions
from patch.data.tokenizer import special_tokens
from patch.device import usable_cores
from patch.storage.places import StrPath

TOKEN_RULES = 5
"""Version of the rules that turn rows into tokens: formats, rendering, encoding, truncation. Raise it with
every change of a token or a mask, so that older cache entries are not used."""

_PACKAGES = ("jinja2", "tokenizers", "transformers")
"""Packages that render and encode. Their versions are part of the key."""
_NAME = "llama-megatron-patch"


def user_cache(fallback: Path) -> Path:
    """Return this project's folder in XDG_CACHE_HOME or ~/.cache, and create it. Return `fallback` if there
    is no home, or if the folder cannot be written."""
    home = os.path.expanduser("~")
    chosen = os.environ.get("XDG_CACHE_HOME") or (os.path.join(home, ".cache") if home != "~" else "")
    if not os.path.isabs(chosen):  # the specification ignores other values
        return fallback
    folder = Path(chosen, _NAME)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return fallback
    return folder if os.access(folder, os.W_OK | os.X_OK) else fallback


_MOST_WORKERS = 32
"""Limit of the default, because one process reads the rows for all workers."""


@dataclass(frozen=True, slots=True)
class SftOptions:
    """Rules for making samples from rows, and resources for the work."""

    format: FormatOptions = field(default_factory=FormatOptions)
    row_kind: RowKind = "conversation"
    """Kind of rows. A pair gives two sequences; the label of an unpaired answer is in its first token."""
    render: RenderOptions = field(default_factory=RenderOptions)
    """Trained turns, and the meaning of special tokens in the rows."""
    long_samples: LongSamples = "cut-end"
    """Rule for a conversation that is longer than a sample (see truncation.py)."""
    max_dropped_share: float = 0.1
    num_workers: int = 1
    """Processes that render and encode."""
    cache_dir: StrPath | None = None
    """Folder of the token cache, or None to keep the tokens in memory."""


def sft_options(data: DataConfig, fallback_cache: Path, row_kind: RowKind) -> SftOptions:
    """Return the options of a run. `fallback_cache` is for a user whose own cache folder cannot be written.

    Raises:
        ConfigError: `--columns` cannot be parsed.
    """
    return SftOptions(
        format=FormatOptions(parse_columns(data.columns), data.alpaca_input_join),
        row_kind=row_kind,
        render=RenderOptions(data.train_on, data.allow_special_tokens),
        long_samples=data.long_samples,
        max_dropped_share=data.max_dropped_share,
        num_workers=data.data_workers or min(_MOST_WORKERS, usable_cores()),
        cache_dir=user_cache(fallback_cache) if data.cache_dir is None else Path(data.cache_dir),
    )


def origin_of(
    files: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerBase, options: SftOptions, length: int
) -> tuple[str, dict[str, str]]:
    """Return a set's key, and all that decides its tokens: names for messages, and values or hashes.

    The key is a hash of all that decides the tokens, in 64 hexadecimal digits.

    Args:
        files: for each file, its name in the report and the hash of its content; empty without a cache.
    """
    kind = options.row_kind
    backend = tokenizer.backend_tokenizer.to_str().encode()
    named_tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    origin = {
        "the rules of this program": str(TOKEN_RULES),
        **{package: version(package) for package in _PACKAGES},
        **({} if kind == "conversation" else {"the objective": "pairs" if kind == "pair" else kind}),
        "the settings of the data": _hash(
            [asdict(options.format), asdict(options.render), options.long_samples, length]
        ),
        "the chat template": _hash(tokenizer.chat_template),
        "the tokenizer": _hash([sha256(backend).hexdigest(), special_tokens(tokenizer), named_tokens]),
    }
    rows = sha256(" ".join(digest for _, digest in files).encode()).hexdigest()
    return _hash([files, origin]), origin | ({"the rows": rows} if files else {})


def _hash(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
