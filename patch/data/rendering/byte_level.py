"""Byte-level BPE by tiktoken: the ids of tokenizers in a fraction of the time, where that can be proven.

LLaMA 3's, Qwen 2's and Qwen 3's tokenizers cut a text at added tokens, cut what is between by a regular
expression, and merge the bytes of each piece. Both libraries merge two neighbours at a time. tokenizers
takes, of the pairs in its list of merges, the one that is listed first. tiktoken takes, of all pairs whose
concatenation is a token, the one whose concatenation has the smallest id. Of several equal pairs both take
the leftmost. The ids are equal if

1. the ids that the merges make ascend in the order of the list, and
2. no token that tiktoken knows becomes exactly two tokens when tokenizers merges its bytes alone.

Proof: suppose that both have made the same merges so far, and that the neighbours p and q together are a
token t that tiktoken knows. The merges within t were made in the order in which tokenizers merges t alone,
because what surrounds t does not change which pair within t is first. So tokenizers, merging t alone, also
comes to p q. It cannot stop there (2.), so p q is in its list: both see the same pairs. Merging t alone has
one course, so of one t it is always the same pair p q. Then the smallest id is the first in the list (1.),
and the leftmost of equal ids is the leftmost of equal pairs: both make the same merge.

If the list has every pair of tokens that makes a token, 2. is true, as for LLaMA 3. Otherwise tiktoken gets
only the tokens that merging makes, as for Qwen. That would be wrong for a tokenizer that takes a piece which
is a token without merging it (`ignore_merges`), as tiktoken always does: it is left to the `encoder`'s copy.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import tiktoken
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from patch.data.rendering.spans import MARK, any_of, unmarked

_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{numbers}|"
    r" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = (_PATTERN.format(numbers="{1,3}"), _PATTERN.format(numbers=""))
"""LLaMA 3's, and that of Qwen 2 and 3. Both libraries cut by them alike, as the tests show. Each character is
in a piece, which matters because tiktoken leaves out what is in none."""
_NEW_CHARACTERS = "\ua7d0\U0001df00\U0001e4d0\U00011f50\U0002ebf0\U000105c0\U00011bf0\U000323b0\U00011de0"
"""Letters and numbers of Unicode 14, 15, 15.1, 16 and 17, by which their tables are told apart."""
_LONGEST_TEXT = 1 << 18
"""Characters; tokenizers encodes a longer one. tiktoken panics at a million blanks in a row."""
_UNUSUAL = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
"""What changes how a piece is merged. How unknown bytes are treated does not matter: all are known."""


class ByteLevelEncoder:
    """Encodes texts as a tokenizer does that `byte_level_encoder` accepts.

    Args:
        backend: the tokenizer.
        pattern: the regular expression by which it cuts texts.
        ranks: the bytes and id of each token that texts become.
        added: the id of each of its added tokens.
        special: those of them that are text where a row spells them out.
    """

    def __init__(
        self,
        backend: Tokenizer,
        pattern: str,
        ranks: dict[bytes, int],
        added: dict[str, int],
        special: Collection[str],
    ) -> None:
        self._backend = backend
        self._tiktoken = tiktoken.Encoding(
            "tokenizer.json", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}
        )
        self._ids = added
        self._special = frozenset(special)
        self._added = re.compile(f"({any_of(added)})")
        self._not_special = re.compile(f"({any_of(added.keys() - self._special)})")

    def ids(self, text: str) -> list[int]:
        """The ids of the added tokens in a marked text, and of what is between them.

        Raises:
            UnicodeError: the text has a lone surrogate that is not a mark.
        """
        ids: list[int] = []
        for index, part in enumerate(self._parts(text)):
            if index % 2:
                ids.append(self._ids[part])
            elif part:
                ids += self._merged(part)
        return ids

    def _parts(self, text: str) -> list[str]:
        """Texts and added tokens in turn."""
        parts = self._added.split(text)
        if MARK not in text:
            return parts
        # A mark separates special tokens only. So what is between them is searched for the others without it.
        texts_and_special = [parts[0]]
        for token, following in zip(parts[1::2], parts[2::2], strict=True):
            if token in self._special:
                texts_and_special += [token, following]
            else:
                texts_and_special[-1] += token + following
        parts = []
        for index, part in enumerate(texts_and_special):
            parts += [part] if index % 2 else self._not_special.split(unmarked(part))
        return parts

    def _merged(self, text: str) -> list[int]:
        """The ids of a text without added tokens."""
        if not text.isascii():
            text.encode()  # tiktoken would replace a lone surrogate
            if self._backend.normalizer is not None:
                text = self._backend.normalizer.normalize_str(text)
        if len(text) <= _LONGEST_TEXT:
            return self._tiktoken.encode_ordinary(text)
        pieces = self._backend.pre_tokenizer.pre_tokenize_str(text)
        model = self._backend.model
        return [token.id for piece, _ in pieces for token in model.tokenize(piece)]


def byte_level_encoder(
    backend: Tokenizer, described: dict[str, Any], special: Collection[str]
) -> ByteLevelEncoder | None:
    """The encoder; None if tiktoken might make other ids than this tokenizer.

    Args:
        backend: the tokenizer.
        described: what its `to_str` writes.
        special: the added tokens that are text where a row spells them out.
    """
    pattern = _pattern(described["pre_tokenizer"])
    added = {token["content"]: token["id"] for token in described["added_tokens"]}
    if (
        pattern is None
        or described["normalizer"] not in (None, {"type": "NFC"})
        or not all(map(_is_plain, described["added_tokens"]))
        or not _have_equal_tables()
    ):
        return None
    ranks = _ranks(backend, described["model"], special)
    return None if ranks is None else ByteLevelEncoder(backend, pattern, ranks, added, special)


def _pattern(pre_tokenizer: Any) -> str | None:
    """The regular expression by which texts are cut; None if it is not known, or more is done than to cut."""
    match pre_tokenizer:
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        } if pattern in _PATTERNS:
            return pattern
    return None


def _is_plain(token: dict[str, Any]) -> bool:
    """Whether an added token is found as it is spelled, wherever it stands, and takes no blanks around it."""
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    return bool(token["content"]) and not any(token[flag] for flag in flags)


def _have_equal_tables() -> bool:
    """Whether both libraries have the same version of Unicode: which characters are letters and numbers."""
    one_byte = {bytes([byte]): byte for byte in range(256)}
    for kind in (r"\p{L}", r"\p{N}"):
        finder = tiktoken.Encoding(kind, pat_str=kind, mergeable_ranks=one_byte, special_tokens={})
        found = bytes(finder.encode_ordinary(_NEW_CHARACTERS)).decode()
        split = pre_tokenizers.Split(Regex(kind), "removed")
        left = "".join(piece for piece, _ in split.pre_tokenize_str(_NEW_CHARACTERS))
        if sorted(found + left) != sorted(_NEW_CHARACTERS):
            return False
    return True


def _ranks(backend: Tokenizer, model: dict[str, Any], special: Collection[str]) -> dict[bytes, int] | None:
    """The bytes and id of each token that texts become; None if 1. or 2. is not known to be true.

    Args:
        backend: the tokenizer.
        model: the description of its model.
        special: tokens that are not made of text.
    """
    if model["type"] != "BPE" or any(map(model.get, _UNUSUAL)):
        return None
    vocab: dict[str, int] = model["vocab"]
    made = [vocab[first + second] for first, second in model["merges"]]
    if made != sorted(made) or not {vocab.get(token) for token in special}.isdisjoint(made):
        return None
    if not model["ignore_merges"]:
        vocab = {token: id_ for token, id_ in vocab.items() if len(backend.model.tokenize(token)) == 1}
    elif not vocab.keys().isdisjoint(special) or _num_pairs(vocab) != len(made):
        return None
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    ranks = {
        bytes(map(byte_of.__getitem__, token)): id_
        for token, id_ in vocab.items()
        if byte_of.keys() >= set(token)  # what has another character, such as a blank, is in no text
    }
    has_all_bytes = all(bytes([byte]) in ranks for byte in range(256))
    return ranks if has_all_bytes and len(set(ranks.values())) == len(ranks) else None


def _num_pairs(vocab: Collection[str]) -> int:
    """The number of pairs of tokens that make a token."""
    return sum(
        token[:size] in vocab and token[size:] in vocab for token in vocab for size in range(1, len(token))
    )
