"""Encodes spans with any tokenizer; special tokens that the row's own text spells out become text.

A copy of the tokenizer knows every special token under another name, which no text can spell, with the same
id. The special tokens that the chat template wrote are renamed before a text is encoded; what else looks like
one is text to the copy. Where no row spells out a special token, the ids are those of the tokenizer itself.

The prefix space that tokenizers of LLaMA 2's kind write is left out where a span continues a text.

Prompt and answer are encoded separately, because generation encodes the prompt alone; encoded together,
byte-level BPE could merge the last characters of the header with the first ones of the answer.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from patch.data.rendering.spans import Span, any_of, unmarked
from patch.data.tokenizer import backend_of
from patch.errors import DataError

_NAME_BYTES = 16


class _Piece(NamedTuple):
    """A text to encode, and which tokenizer encodes it."""

    text: str
    has_prefix: bool
    """Whether the tokenizer may write its prefix space."""
    skipped: int = 0
    """Number of ids at its begin that belong to the span before."""


class SpanEncoder:
    """Encodes the spans of samples.

    With a large vocabulary it takes seconds to make: make it once. It can be used after a fork.

    Args:
        tokenizer: a fast tokenizer, one with a `tokenizers.Tokenizer` behind it.
        allow_special_tokens: special tokens that a row's text spells out are encoded as such, not as text.

    Raises:
        DataError: the tokenizer is not a fast one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, allow_special_tokens: bool = False) -> None:
        if (backend := backend_of(tokenizer)) is None:
            raise DataError(
                f"tokenizer: {tokenizer.name_or_path} is a {type(tokenizer).__name__}, which is not a fast "
                "tokenizer; expected one with a tokenizer.json (or one that transformers converts to it)",
                field="tokenizer_name_or_path",
            )
        described = orjson.loads(backend.to_str())
        added = described["added_tokens"]
        spelled_out: set[str] = set()
        """The special tokens that are text where a row spells them out."""
        if not allow_special_tokens:
            spelled_out = {token["content"] for token in added if token["special"]}
            spelled_out |= {token["content"] for token in added} & set(tokenizer.all_special_tokens)
            # A single character is a piece of every text: without it in the vocabulary, text would be lost.
            spelled_out = {token for token in spelled_out if len(token) > 1}
        described |= {"truncation": None, "padding": None, "post_processor": None}
        self._added = re.compile(any_of(token["content"] for token in added))
        self._added_at_end = re.compile(
            rf"(?:{any_of(token['content'] for token in added if not token['single_word'])})\Z"
        )
        self._added_with_blanks = re.compile(
            rf"\s+(?:{any_of(token['content'] for token in added if token['lstrip'])})|{self._added.pattern}"
        )
        self._longest = max((len(token["content"]) for token in added), default=0)
        self._names = {token: secrets.token_hex(_NAME_BYTES) for token in spelled_out}
        """The other name of each special token."""
        _rename(described, self._names)
        self._tokenizer = self._without_prefix = _made(described)
        schemes = _remove_prefix(described)
        if schemes:
            self._without_prefix = _made(described)
        self._is_prefix_after_tokens = bool(schemes - {"first"})
        """Whether the prefix space is also written after each added token."""

    def encode(self, samples: Sequence[Sequence[Span]]) -> list[list[list[int]]]:
        """The ids of each span of each sample. The tokenizer's threads share the work.

        Raises:
            Exception: the tokenizer cannot encode a text (tokenizers raises no other class).
        """
        spans = [self._pieces(sample) for sample in samples]
        pieces = [piece for sample in spans for span in sample for piece in span]
        encoded = iter(self._encode(pieces))
        return [[[token for _ in span for token in next(encoded)] for span in sample] for sample in spans]

    def _encode(self, pieces: list[_Piece]) -> list[list[int]]:
        ids: list[list[int]] = [[]] * len(pieces)
        for tokenizer, has_prefix in ((self._tokenizer, True), (self._without_prefix, False)):
            chosen = [index for index, piece in enumerate(pieces) if piece.has_prefix == has_prefix]
            if not chosen:
                continue
            texts = [pieces[index].text for index in chosen]
            for index, encoding in zip(
                chosen, tokenizer.encode_batch_fast(texts, add_special_tokens=False), strict=True
            ):
                ids[index] = encoding.ids[pieces[index].skipped :]
        return ids

    def _pieces(self, sample: Sequence[Span]) -> list[list[_Piece]]:
        """The pieces of each span; most spans are one piece."""
        pieces: list[list[_Piece]] = []
        before = ""
        for span in sample:
            if span.begins_text or not before:
                pieces.append([_Piece(self._renamed(span.text), True)])
            elif (token := self._last_added(before)) is not None:
                # After its token, as the whole text would be encoded: some tokens take the blanks after them.
                pieces.append([_Piece(self._renamed(token + span.text), True, skipped=1)])
            else:
                pieces.append(self._continued(span.text))
            before = span.text or before
        return pieces

    def _continued(self, text: str) -> list[_Piece]:
        """The pieces of a text that continues other text."""
        if self._without_prefix is self._tokenizer:
            return [_Piece(self._renamed(text), True)]
        found = self._added_with_blanks.search(text) if self._is_prefix_after_tokens else None
        end = len(text) if found is None else found.start()
        head = [_Piece(self._renamed(text[:end]), False)]
        return head if end == len(text) else [*head, _Piece(self._renamed(text[end:]), True)]

    def _last_added(self, text: str) -> str | None:
        """The added token that a text ends with."""
        found = self._added_at_end.search(text, max(0, len(text) - self._longest))
        return None if found is None else found[0]

    def _renamed(self, text: str) -> str:
        """The text for the tokenizer: with the template's special tokens renamed, and without marks."""
        return unmarked(self._added.sub(lambda match: self._names.get(match[0], match[0]), text))


def _made(described: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a description."""
    return Tokenizer.from_str(orjson.dumps(described).decode())


def _rename(described: dict[str, Any], names: dict[str, str]) -> None:
    """Give tokens other names, in place, wherever the description of a tokenizer has them.

    Args:
        described: what `tokenizers.Tokenizer.to_str` writes.
        names: the new name of each token that gets one.
    """

    def renamed(token: Any) -> Any:
        return names.get(token, token)

    model = described["model"]
    for token in described["added_tokens"]:
        token["content"] = renamed(token["content"])
    if model.get("unk_token") is not None:
        model["unk_token"] = renamed(model["unk_token"])
    if isinstance(model["vocab"], dict):
        if names.keys().isdisjoint(model["vocab"]):
            return  # the usual case with BPE: only the list of added tokens has them, so no merge does
        model["vocab"] = {renamed(token): id_ for token, id_ in model["vocab"].items()}
    else:  # Unigram: a list with the score of each token
        model["vocab"] = [[renamed(token), score] for token, score in model["vocab"]]
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if not _makes(pair, names)]


def _makes(pair: str | list[str], names: dict[str, str]) -> bool:
    """Whether a merge of BPE makes one of the tokens out of text, or needs one."""
    first, second = pair.split(" ", 1) if isinstance(pair, str) else pair
    return first + second in names or first in names or second in names


def _remove_prefix(described: Any) -> set[str]:
    """Remove the prefix space from the description of a tokenizer, in place; where it was written."""
    if isinstance(described, list):
        return set().union(*map(_remove_prefix, described))
    if not isinstance(described, dict):
        return set()
    schemes: set[str] = set()
    for step in [described.get("normalizer"), described.get("pre_tokenizer"), *_steps_of(described)]:
        schemes |= _remove_prefix(step)
    if described.get("type") == "Metaspace" and described["prepend_scheme"] != "never":
        schemes.add(described["prepend_scheme"])
        described["prepend_scheme"] = "never"
    elif described.get("type") == "ByteLevel" and described["add_prefix_space"]:
        schemes.add("always")
        described["add_prefix_space"] = False
    elif described.get("type") == "Prepend":
        schemes.add("always")
        described["prepend"] = ""
    return schemes


def _steps_of(described: dict[str, Any]) -> list[Any]:
    """The parts of a normalizer or pre-tokenizer that is a sequence."""
    return [*described.get("normalizers", ()), *described.get("pretokenizers", ())]
