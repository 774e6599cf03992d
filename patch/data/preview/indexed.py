"""Preview of .bin/.idx sets: the beginnings of their documents as tokens, and figures of the whole set.

In a pre-training set, all tokens of a document are trained. A fine-tuning set of Pai-Megatron-Patch is
recognised by its negative numbers (see `indexed_sft`); its documents are packs of conversations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import numpy as np
from transformers import PreTrainedTokenizerBase

from patch.config.data_spec import DataPart
from patch.data.pretraining.indexed_dataset import open_indexed
from patch.data.pretraining.indexed_sft import IndexedSftSource
from patch.data.pretraining.provenance import read_provenance
from patch.data.preview.figures import Figures, format_lengths, name_of
from patch.data.preview.tokens import ShownRow, TokenTexts
from patch.data.tokenizer import vocabulary_size
from patch.errors import DataError

_BEGINNING = 512
"""Tokens of each document that are shown."""

_Conversation = tuple[np.ndarray, np.ndarray]
"""Token ids int64 [size], and whether each token is trained, bool [size]."""


class IndexedPreview:
    """Documents of a .bin/.idx set.

    Raises:
        DataError: the files cannot be used, or were made with another vocabulary.
    """

    def __init__(self, part: DataPart, tokenizer: PreTrainedTokenizerBase) -> None:
        self._part, self._tokenizer = part, tokenizer
        self._indexed = indexed = open_indexed(part.path)
        self._provenance = read_provenance(part.path, indexed, tokenizer)
        ends = np.concatenate(([0], np.cumsum(indexed.sequence_lengths, dtype=np.int64)))
        self._ends = ends[indexed.document_indices]
        self._sizes = np.diff(self._ends)
        """int64 [D]: tokens of each document."""
        self._packs: IndexedSftSource | None = None
        first = next(length for length in indexed.sequence_lengths if length)
        if (indexed.bin_reader.read(indexed.index.dtype, int(first), 0) < 0).any():
            self._length = int(self._sizes[0]) // 2
            self._packs = IndexedSftSource(part.path, indexed, self._length, vocabulary_size(tokenizer))
            self._packs.check()

    def rows(self, numbers: Sequence[int]) -> Iterator[ShownRow]:
        """Yield documents by their numbers, from 1. Numbers that the set does not have are left out.

        Raises:
            DataError: the set has none of the documents; or a fine-tuning set is damaged.
        """
        there = [number for number in numbers if number <= len(self._sizes)]
        if not there:
            raise DataError(
                f"{self._part.path}: no document {numbers[0]}, expected one of {len(self._sizes)} (--row)"
            )
        texts = TokenTexts(self._tokenizer)
        for number in there:
            samples, remarks = self._shown(number - 1)
            where = f"{self._part.path}: document {number}"
            yield ShownRow(where, [texts.shown(*sample) for sample in samples], remarks)

    def _shown(self, index: int) -> tuple[list[_Conversation], list[str]]:
        if self._packs is not None:
            conversations = self._conversations(index)
            padding = self._length - sum(len(ids) for ids, _ in conversations)
            return conversations, [f"and {padding:,} tokens of padding"] if padding else []
        size = int(self._sizes[index])
        if not size:
            return [], ["an empty document"]
        ids = self._numbers(index, _BEGINNING)
        remarks = [f"the first {len(ids)} of {size:,} tokens"] if len(ids) < size else []
        return [(ids, np.ones(len(ids), bool))], remarks

    def _numbers(self, index: int, most: int) -> np.ndarray:
        dtype = self._indexed.index.dtype
        offset = int(self._ends[index]) * np.dtype(dtype).itemsize
        count = min(int(self._sizes[index]), most)
        return self._indexed.bin_reader.read(dtype, count, offset).astype(np.int64)

    def _conversations(self, index: int) -> list[_Conversation]:
        assert self._packs is not None
        sample = self._packs[index]
        assert sample.lengths is not None, "sets of this kind have them"
        borders = np.cumsum(sample.lengths.numpy())[:-1]
        # The loss mask covers labels, and a label is the next token.
        learned = np.concatenate(([False], sample.loss_mask.numpy()[:-1] > 0))
        ids = np.split(sample.tokens.numpy(), borders)
        has_padding = self._numbers(index, self._length)[-1] >= 0
        pairs = list(zip(ids, np.split(learned, borders), strict=True))
        return pairs[:-1] if has_padding else pairs

    def figures(self, sequence_length: int) -> Figures:
        """Return figures of the set. A fine-tuning set has its own sequence length.

        Raises:
            DataError: a fine-tuning set is damaged.
        """
        if self._packs is None:
            counted, sizes = "document", self._sizes
            counts = {"documents": len(sizes), "empty documents": int((sizes == 0).sum())}
            if len(self._indexed) != len(sizes):
                counts["sequences"] = len(self._indexed)
            counts["tokens"] = int(sizes.sum())
            counts[f"samples of {sequence_length:,}"] = (counts["tokens"] - 1) // sequence_length
        else:
            found = [pair for index in range(len(self._sizes)) for pair in self._conversations(index)]
            counted, sizes = "conversation", np.array([len(ids) for ids, _ in found])
            counts = {
                f"samples of {self._length:,}": len(self._sizes),
                "conversations": len(sizes),
                "tokens": int(sizes.sum()),
                "learned": sum(int(learned.sum()) for _, learned in found),
            }
        return self._figures(counts, counted, sizes)

    def _figures(self, counts: dict[str, int], counted: str, sizes: np.ndarray) -> Figures:
        made = self._provenance
        if made is None:
            origin = [("made by", "not known: no .meta.json says which tokenizer and program")]
        else:
            origin = [
                ("tokenizer", f"{made.tokenizer}, {made.vocabulary_size:,} ids, the same in the one given"),
                ("end of documents", "none" if made.eod is None else f"id {made.eod}"),
                ("made by", f"{made.made_by} from the key {made.json_key}"),
            ]
        longest, stored_as = int(sizes.max()), np.dtype(self._indexed.index.dtype).name
        table = [
            *[(what, f"{count:,}") for what, count in counts.items()],
            ("length", format_lengths(sizes, f"longest {longest:,} tokens of a {counted}")),
            ("stored as", stored_as),
            *origin,
        ]
        values = {
            "counts": counts,
            "stored_as": stored_as,
            "counted": counted,
            "median": int(np.median(sizes)),
            "longest": longest,
            "provenance": None if made is None else asdict(made),
        }
        return Figures(name_of(self._part), table, values)
