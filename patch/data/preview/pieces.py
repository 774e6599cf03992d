"""What the tokens of a sample stand for, token by token.

A token of a byte-level vocabulary, or a byte token of a SentencePiece one, may be a part of a character. So
tokens are first bytes; the bytes of all tokens together are characters; and each character is shown at the
token in which it begins.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from patch.data.tokenizer import special_tokens

_BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}
"""Byte-level vocabularies write each byte as a printable character. Source: GPT-2."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"
"""How vocabularies of SentencePiece write a space."""


class Piece(NamedTuple):
    """One token of a sample."""

    id: int
    text: str
    """The characters that begin in this token; a byte that is no part of a character is a lone surrogate, as
    Python's `surrogateescape` has it. Empty if the token only continues a character."""
    is_special: bool
    continues: bool
    """Whether its first byte continues a character that began in an earlier token."""


class TokenTexts:
    """Says what tokens stand for.

    Args:
        tokenizer: a fast tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._special = set(special_tokens(tokenizer))
        self._added = {id_: token.content for id_, token in tokenizer.added_tokens_decoder.items()}
        self._backend = tokenizer.backend_tokenizer
        decoder = json.loads(self._backend.to_str())["decoder"]
        self._steps = {step["type"] for step in _steps(decoder)}
        self._bytes: dict[int, bytes] = {}

    def pieces(self, ids: Sequence[int]) -> list[Piece]:
        """The tokens of a sample, in their order."""
        parts = [self._bytes_of(id_) for id_ in ids]
        characters = _characters(b"".join(parts))
        character, start = next(characters, ("", 0))
        pieces, end = [], 0
        for id_, part in zip(ids, parts, strict=True):
            begin, end = end, end + len(part)
            continues = bool(part) and start > begin
            text = ""
            while character and start < end:
                text += character
                character, start = next(characters, ("", start + _size(character)))
            pieces.append(Piece(id_, text, self.is_special(id_), continues))
        return pieces

    def is_special(self, id_: int) -> bool:
        """Whether the token is a special one."""
        return self._added.get(id_) in self._special

    def _bytes_of(self, id_: int) -> bytes:
        if id_ not in self._bytes:
            self._bytes[id_] = self._added[id_].encode() if id_ in self._added else self._decoded(id_)
        return self._bytes[id_]

    def _decoded(self, id_: int) -> bytes:
        token = self._backend.id_to_token(id_)
        if token is None:
            return f"<no token {id_}>".encode()
        if "ByteLevel" in self._steps:
            if all(character in _BYTE_OF for character in token):
                return bytes(_BYTE_OF[character] for character in token)
            return token.encode()
        if "ByteFallback" in self._steps and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        return token.replace(_SPACE, " ").encode()


def _steps(decoder: dict | None) -> Iterator[dict]:
    """The steps of a tokenizer's decoder."""
    if decoder is None:
        return
    yield decoder
    for step in decoder.get("decoders", ()):
        yield from _steps(step)


def _characters(data: bytes) -> Iterator[tuple[str, int]]:
    """Each character, or byte that is no part of one, with the index of its first byte."""
    start = 0
    for character in data.decode(errors="surrogateescape"):
        yield character, start
        start += _size(character)


def _size(character: str) -> int:
    return len(character.encode(errors="surrogateescape"))
