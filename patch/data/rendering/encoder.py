"""Encodes spans; special tokens that the row's own text spells out become text.

Prompt and answer are encoded separately, because generation encodes the prompt alone; encoded together,
byte-level BPE could merge the last characters of the header with the first ones of the answer.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import orjson
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from patch.data.rendering.byte_level import byte_level_encoder
from patch.data.rendering.renaming import RenamingEncoder
from patch.data.rendering.spans import Span
from patch.errors import DataError


@contextmanager
def _without_collections() -> Iterator[None]:
    """The garbage collector would look at every entry of a large vocabulary again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class SpanEncoder:
    """Encodes the spans of samples; by tiktoken where its ids are known to be the tokenizer's.

    With a large vocabulary it takes seconds to make: make it once. It can be pickled, and used after a fork.

    Args:
        tokenizer: a fast tokenizer, one with a `tokenizers.Tokenizer` behind it.
        allow_special_tokens: special tokens that a row's text spells out are encoded as such, not as text.

    Raises:
        DataError: the tokenizer is not a fast one.
    """

    @_without_collections()
    def __init__(self, tokenizer: PreTrainedTokenizerBase, allow_special_tokens: bool = False) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise DataError(
                f"tokenizer: {tokenizer.name_or_path} is a {type(tokenizer).__name__}, which is not a fast "
                "tokenizer; expected one with a tokenizer.json (or one that transformers converts to it)",
                field="tokenizer_name_or_path",
            )
        described = orjson.loads(backend.to_str())
        spelled_out: set[str] = set()
        """The special tokens that are text where a row spells them out."""
        if not allow_special_tokens:
            added = {token["content"]: token["special"] for token in described["added_tokens"]}
            spelled_out = {token for token, is_special in added.items() if is_special}
            spelled_out |= added.keys() & set(tokenizer.all_special_tokens)
            # A single character is a piece of every text: without it in the vocabulary, text would be lost.
            spelled_out = {token for token in spelled_out if len(token) > 1}
        byte_level = byte_level_encoder(backend, described, spelled_out)
        self._encoder = byte_level or RenamingEncoder(described, spelled_out)

    def encode(self, samples: Sequence[Sequence[Span]]) -> list[list[list[int]]]:
        """The ids of each span of each sample.

        Raises:
            Exception: the tokenizer cannot encode a text (tokenizers raises no other class).
        """
        return self._encoder.encode(samples)
