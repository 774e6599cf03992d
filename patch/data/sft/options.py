"""All that decides the tokens of a fine-tuning set, and the user's (XDG) cache folder."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from patch.config.choices import RowKind
from patch.config.data_spec import parse_columns
from patch.config.schema import DataConfig
from patch.data.tokenizer import special_tokens

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


def origin_of(
    files: Sequence[tuple[str, str]],
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    row_kind: RowKind,
) -> tuple[str, dict[str, str]]:
    """Return a set's key, and all that decides its tokens: names for messages, and values or hashes.

    The key is a hash of all that decides the tokens, in 64 hexadecimal digits.

    Args:
        files: for each file, its name in the report and the hash of its content; empty without a cache.
    """
    backend = tokenizer.backend_tokenizer.to_str().encode()
    named_tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    of_rows = {"columns": parse_columns(data.columns), "alpaca_input_join": data.alpaca_input_join}
    of_turns = {"train_on": data.train_on, "allow_special_tokens": data.allow_special_tokens}
    objective = "pairs" if row_kind == "pair" else row_kind
    origin = {
        "the rules of this program": str(TOKEN_RULES),
        **{package: version(package) for package in _PACKAGES},
        **({} if row_kind == "conversation" else {"the objective": objective}),
        "the settings of the data": _hash([of_rows, of_turns, data.long_samples, data.max_padding_length]),
        "the chat template": _hash(tokenizer.chat_template),
        "the tokenizer": _hash([sha256(backend).hexdigest(), special_tokens(tokenizer), named_tokens]),
    }
    rows = sha256(" ".join(digest for _, digest in files).encode()).hexdigest()
    return _hash([files, origin]), origin | ({"the rows": rows} if files else {})


def _hash(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
