"""Origin of a pre-training set: the tokenizer that made its ids, and the end of its documents.

.bin and .idx do not contain the origin. llama-patch preprocess writes it to PREFIX.meta.json beside them.
Sets of other tools have no such file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.datasets.indexed_dataset import IndexedDataset
from transformers import PreTrainedTokenizerBase

from patch.data.pretraining.indexed_dataset import total_tokens
from patch.errors import DataError
from patch.logger import get_logger
from patch.storage.atomic import write_atomically
from patch.storage.text_files import read_json

_logger = get_logger(__name__)

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Provenance:
    """Contents of PREFIX.meta.json."""

    tokenizer: str
    """Folder or name from which the tokenizer was loaded."""
    vocabulary_size: int
    """Largest id plus one."""
    vocabulary_sha256: str
    """See `vocabulary_hash`."""
    eod: int | None
    """Id that ends each document, or None if documents have no end."""
    json_key: str
    documents: int
    """Documents, empty ones included."""
    tokens: int
    """Ids in the .bin."""
    made_by: str

    def write(self, prefix: str) -> None:
        """Write PREFIX.meta.json atomically.

        Raises:
            OSError: it cannot be written.
        """
        values = {"format": _FORMAT, **dataclasses.asdict(self)}
        write_atomically(path_of(prefix), json.dumps(values, indent=1) + "\n")


def path_of(prefix: str) -> Path:
    """Return the path of PREFIX.meta.json."""
    return Path(f"{prefix}.meta.json")


def vocabulary_hash(tokenizer: PreTrainedTokenizerBase, size: int) -> str:
    """Return the SHA-256 of the tokens whose ids are below `size`, in hexadecimal digits. Tokens that are
    added later have larger ids and do not change it. A chat template does not change it either."""
    by_id = sorted((index, token) for token, index in tokenizer.get_vocab().items() if index < size)
    return hashlib.sha256(json.dumps(by_id).encode()).hexdigest()


def read_provenance(
    prefix: str,
    indexed: IndexedDataset,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    warns: bool = True,
) -> Provenance | None:
    """Return the contents of PREFIX.meta.json, or None if it does not describe these files.

    Args:
        tokenizer: must have the vocabulary of the set; None skips this check.
        warns: log a warning if the result is None.
    Raises:
        DataError: the set was made with another vocabulary.
    """
    path = path_of(prefix)
    counts = (len(indexed.document_indices) - 1, total_tokens(indexed))
    try:
        found = _parse(read_json(path))
        complaint = None if (found.documents, found.tokens) == counts else "is of other files"
    except FileNotFoundError:
        complaint = "is missing"
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        complaint = "cannot be read"
    if complaint is None:
        if tokenizer is not None:
            _check_tokenizer(prefix, found, tokenizer)
        return found
    if warns:
        _logger.warning("%s %s, so it cannot be checked which tokenizer made the set", path, complaint)
    return None


def _parse(values: Any) -> Provenance:
    """Raise ValueError, TypeError, KeyError or AttributeError if the values are not those of such a file."""
    if values.pop("format") != _FORMAT:
        raise ValueError("another format")
    found = Provenance(**values)
    if not all(isinstance(value, int | str | None) for value in dataclasses.astuple(found)):
        raise ValueError("not plain values")
    if not isinstance(found.vocabulary_size, int) or isinstance(found.eod, str):
        raise ValueError("not numbers")
    return found


def _check_tokenizer(prefix: str, found: Provenance, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a set whose ids mean other tokens to this tokenizer. The tokenizer may have more tokens."""
    if vocabulary_hash(tokenizer, found.vocabulary_size) != found.vocabulary_sha256:
        raise DataError(
            f"{prefix}.bin: was made with tokenizer {found.tokenizer} (says {path_of(prefix).name}), whose "
            f"{found.vocabulary_size} ids are not all the same tokens in {tokenizer.name_or_path}; expected "
            "the same vocabulary: give that tokenizer, or make the set again",
            field="tokenizer_name_or_path",
        )
