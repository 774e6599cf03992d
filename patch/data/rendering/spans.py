"""Spans, the pieces of a rendered conversation: marks in special tokens, and ids.

Special tokens that a row's own text spells out are marked, so that they can be encoded as text. The mark is a
lone surrogate inside the token, which distinguishes it from the chat template's tokens. No text of a file
holds a lone surrogate, Jinja passes it on, and the encoder removes it.

Any fast tokenizer encodes spans. A copy of the tokenizer knows every special token under another name, which
no text can spell, with the same id. Special tokens that the chat template wrote are renamed before a text is
encoded. Any other text that looks like a special token is plain text to the copy. If no row spells out a
special token, the ids are those of the tokenizer itself.

Tokenizers like LLaMA 2's write a prefix space. It is left out where a span continues a text.

Prompt and answer are encoded separately, because generation encodes the prompt alone. If they were encoded
together, byte-level BPE could merge the end of the header with the beginning of the answer.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import orjson
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from patch.data.tokenizer import backend_of
from patch.errors import DataError

_NAME_BYTES = 16


class Span(NamedTuple):
    """Piece of a sample's text. All of its tokens are trained, or none is. The text is *marked*: `MARK`
    is inserted into special tokens that the row's own text spells out, so an intact special token comes from
    the template. `unmarked` returns the readable text."""

    text: str
    learned: bool
    begins_text: bool = False
    """Whether the span is encoded as the beginning of a text, with the prefix space of some tokenizers,
    although other spans precede it. The first span of a sample is always encoded so."""
    begins_user_turn: bool = False
    """Whether the user speaks here, after text that is not trained."""


MARK = "\ud800"


def unmarked(text: str) -> str:
    """Return the text without marks."""
    return text.replace(MARK, "")


def any_of(tokens: Iterable[str]) -> str:
    """Return a pattern of the tokens. The longest token comes first, as tokenizers prefer it."""
    return "|".join(map(re.escape, sorted(filter(None, tokens), key=len, reverse=True))) or r"(?!)"


def texts_in(value: Any, *, keys: bool = True) -> Iterator[str]:
    """Yield the texts of JSON-like data, and its keys if asked for."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from texts_in([*(value if keys else ()), *value.values()], keys=keys)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from texts_in(item, keys=keys)


class SpecialTokenMarker:
    """Marks the special tokens that are spelled out in texts."""

    def __init__(self, tokens: Iterable[str]) -> None:
        tokens = list(tokens)
        self._tokens = re.compile(any_of(tokens))
        # The first characters of a token at the end of a text: a template could write the rest after them.
        self._beginnings = tuple({token[:size] for token in tokens for size in range(1, len(token))})
        self._ends = frozenset(text[-1] for text in self._beginnings)

    def marked(self, value: Any) -> Any:
        """Return a copy of JSON-like data with every special token in texts and keys marked."""
        if isinstance(value, str):
            return self._marked_text(value)
        if isinstance(value, dict):
            return {self.marked(key): self.marked(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.marked(item) for item in value]
        return value

    def is_in(self, value: Any) -> bool:
        """Return whether a text or a key of JSON-like data spells out a special token."""
        return any(self._tokens.search(text) is not None for text in texts_in(value))

    def _marked_text(self, text: str) -> str:
        text = self._tokens.sub(lambda match: _interrupted(match[0]), text)
        if text and text[-1] in self._ends and text.endswith(self._beginnings):
            return text + MARK
        return text


def _interrupted(token: str) -> str:
    """Put a mark after each character, because tokens may contain each other."""
    return MARK.join(token) + (MARK if len(token) == 1 else "")


class _Piece(NamedTuple):
    """Text to encode, and the choice of the tokenizer for it."""

    text: str
    has_prefix: bool
    """Whether the tokenizer may write its prefix space."""
    skipped: int = 0
    """Ids at its beginning that belong to the span before."""


class SpanEncoder:
    """Encoder of the spans of samples. It can be used after a fork. Make it once: it takes seconds.

    Args:
        allow_special_tokens: encode special tokens that a row's text spells out as such, not as text.
    Raises:
        DataError: the tokenizer is not a fast one, with a `tokenizers.Tokenizer` behind it.
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
        """Special tokens that become text where a row spells them out."""
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
        """Replacement name of each special token."""
        _rename(described, self._names)
        self._tokenizer = self._without_prefix = _made(described)
        schemes = _remove_prefix(described)
        if schemes:
            self._without_prefix = _made(described)
        self._is_prefix_after_tokens = bool(schemes - {"first"})
        """Whether the prefix space is also written after each added token."""

    def encode(self, samples: Sequence[Sequence[Span]]) -> list[list[list[int]]]:
        """Return the ids of each span of each sample. The tokenizer's threads share the work.

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
        pieces: list[list[_Piece]] = []
        before = ""
        for span in sample:
            if span.begins_text or not before:
                pieces.append([_Piece(self._renamed(span.text), True)])
            elif (token := self._last_added(before)) is not None:
                # Encode the token too, as in the whole text: some tokens absorb the blanks after them.
                pieces.append([_Piece(self._renamed(token + span.text), True, skipped=1)])
            else:
                pieces.append(self._continued(span.text))
            before = span.text or before
        return pieces

    def _continued(self, text: str) -> list[_Piece]:
        """Return the pieces of a text that continues other text."""
        if self._without_prefix is self._tokenizer:
            return [_Piece(self._renamed(text), True)]
        found = self._added_with_blanks.search(text) if self._is_prefix_after_tokens else None
        end = len(text) if found is None else found.start()
        head = [_Piece(self._renamed(text[:end]), False)]
        return head if end == len(text) else [*head, _Piece(self._renamed(text[end:]), True)]

    def _last_added(self, text: str) -> str | None:
        found = self._added_at_end.search(text, max(0, len(text) - self._longest))
        return None if found is None else found[0]

    def _renamed(self, text: str) -> str:
        """Rename the template's special tokens in a text, and remove the marks."""
        return unmarked(self._added.sub(lambda match: self._names.get(match[0], match[0]), text))


def _made(described: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(orjson.dumps(described).decode())


def _rename(described: dict[str, Any], names: dict[str, str]) -> None:
    """Rename tokens, in place, wherever a tokenizer description (`tokenizers.Tokenizer.to_str`) has them."""

    def renamed(token: Any) -> Any:
        return names.get(token, token)

    model = described["model"]
    for token in described["added_tokens"]:
        token["content"] = renamed(token["content"])
    if model.get("unk_token") is not None:
        model["unk_token"] = renamed(model["unk_token"])
    if isinstance(model["vocab"], dict):
        if names.keys().isdisjoint(model["vocab"]):
            return  # the usual case with BPE: the tokens are only in the list of added tokens, so in no merge
        model["vocab"] = {renamed(token): id_ for token, id_ in model["vocab"].items()}
    else:  # Unigram: a list with the score of each token
        model["vocab"] = [[renamed(token), score] for token, score in model["vocab"]]
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if not _makes(pair, names)]


def _makes(pair: str | list[str], names: dict[str, str]) -> bool:
    """Return whether a BPE merge makes or needs one of the tokens."""
    first, second = pair.split(" ", 1) if isinstance(pair, str) else pair
    return first + second in names or first in names or second in names


def _remove_prefix(described: Any) -> set[str]:
    """Remove the prefix space from a tokenizer description, in place. Return the schemes that wrote it."""
    if isinstance(described, list):
        return set().union(*map(_remove_prefix, described))
    if not isinstance(described, dict):
        return set()
    schemes: set[str] = set()
    for steps in ("normalizer", "pre_tokenizer", "normalizers", "pretokenizers"):
        schemes |= _remove_prefix(described.get(steps))
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
