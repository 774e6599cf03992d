"""Sets in .bin/.idx: the beginnings of their documents as tokens, and figures of the whole set.

A pre-training set has documents, all tokens of which are learned. A fine-tuning set of Pai-Megatron-Patch is
known by its negative numbers (see `indexed_sft`); its documents are packs of conversations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset
from transformers import PreTrainedTokenizerBase

from patch.config.data_spec import DataPart
from patch.data.pretraining.indexed_dataset import open_indexed, total_tokens
from patch.data.pretraining.indexed_sft import IndexedSftSource
from patch.data.pretraining.provenance import Provenance, check_tokenizer, read_provenance
from patch.data.preview.pieces import TokenTexts
from patch.data.preview.shown import ShownRow, shown_tokens
from patch.data.preview.statistics import Histogram, name_of
from patch.data.tokenizer import vocabulary_size
from patch.errors import DataError

_BEGINNING = 512
"""Tokens of a document that are shown."""

_Conversation = tuple[np.ndarray, np.ndarray]
"""Token ids int64 [size], and bool [size], whether each is learned."""


@dataclass(frozen=True, slots=True)
class IndexedStatistics:
    """Figures of one set in .bin/.idx."""

    name: str
    counts: dict[str, int]
    """How many documents, conversations, tokens, samples and so on it has, by name."""
    stored_as: str
    """The type of a token in the .bin."""
    counted: str
    """What `lengths` counts: document or conversation."""
    lengths: Histogram
    median: int
    """Tokens of one of them."""
    longest: int
    """Tokens of the longest one."""
    provenance: Provenance | None
    """What PREFIX.meta.json says; None if there is none."""

    @property
    def capacity(self) -> None:
        """A document may have any number of tokens."""
        return

    def table(self) -> list[tuple[str, str]]:
        """The figures in words: a name and a value each."""
        made = self.provenance
        counts = [(name, f"{count:,}") for name, count in self.counts.items()]
        length = f"median {self.median:,}, longest {self.longest:,} tokens of a {self.counted}"
        table = [*counts, ("length", length), ("stored as", self.stored_as)]
        if made is None:
            return [*table, ("made by", "not known: no .meta.json says which tokenizer and program")]
        return [
            *table,
            ("tokenizer", f"{made.tokenizer}, {made.vocabulary_size:,} ids, the same in the one given"),
            ("end of documents", "none" if made.eod is None else f"id {made.eod}"),
            ("made by", f"{made.made_by} from the key {made.json_key}"),
        ]

    def to_json(self) -> dict[str, Any]:
        """The figures as plain values."""
        return asdict(self)


class IndexedPreview:
    """The documents of a pre-training set.

    Args:
        part: names the set.
        indexed: its files.
        tokenizer: says what ids stand for.

    Raises:
        DataError: the set was made with another vocabulary.
    """

    def __init__(self, part: DataPart, indexed: IndexedDataset, tokenizer: PreTrainedTokenizerBase) -> None:
        self.part, self.indexed = part, indexed
        self.tokenizer = tokenizer
        documents = len(indexed.document_indices) - 1
        self.provenance = read_provenance(part.path, documents, total_tokens(indexed))
        if self.provenance is not None:
            check_tokenizer(part.path, self.provenance, tokenizer)
        ends = np.concatenate(([0], np.cumsum(indexed.sequence_lengths, dtype=np.int64)))
        self._ends = ends[indexed.document_indices]
        self.sizes = np.diff(self._ends)
        """int64 [D]: tokens of each document."""

    def rows(self, numbers: Sequence[int]) -> Iterator[ShownRow]:
        """Documents by their numbers, from 1; those that the set does not have are left out.

        Raises:
            DataError: the set has none of them; or a fine-tuning set is damaged.
        """
        there = [number for number in numbers if number <= len(self.sizes)]
        if not there:
            raise DataError(
                f"{self.part.path}: no document {numbers[0]}, expected one of {len(self.sizes)} (--row)"
            )
        texts = TokenTexts(self.tokenizer)
        for number in there:
            samples, remarks = self.shown(number - 1)
            yield ShownRow(
                f"{self.part.path}: document {number}",
                [shown_tokens(texts, ids, learned) for ids, learned in samples],
                remarks,
            )

    def shown(self, index: int) -> tuple[list[_Conversation], list[str]]:
        """What is shown of a document, and remarks."""
        size = int(self.sizes[index])
        if not size:
            return [], ["an empty document"]
        ids = self.numbers(index, _BEGINNING)
        remarks = [f"the first {len(ids)} of {size:,} tokens"] if len(ids) < size else []
        return [(ids, np.ones(len(ids), bool))], remarks

    def numbers(self, index: int, most: int) -> np.ndarray:
        """int64: the first numbers of a document."""
        dtype = self.indexed.index.dtype
        count = min(int(self.sizes[index]), most)
        offset = int(self._ends[index]) * np.dtype(dtype).itemsize
        return self.indexed.bin_reader.read(dtype, count, offset).astype(np.int64)

    def statistics(self, sequence_length: int) -> IndexedStatistics:
        """Figures of the set.

        Args:
            sequence_length: SEQ_LEN of the run.

        Raises:
            DataError: a fine-tuning set is damaged.
        """
        counts = {"documents": len(self.sizes), "empty documents": int((self.sizes == 0).sum())}
        if len(self.indexed) != len(self.sizes):
            counts["sequences"] = len(self.indexed)
        counts["tokens"] = int(self.sizes.sum())
        counts[f"samples of {sequence_length:,}"] = (counts["tokens"] - 1) // sequence_length
        return self.figures(counts, "document", self.sizes)

    def figures(self, counts: dict[str, int], counted: str, sizes: np.ndarray) -> IndexedStatistics:
        """The figures, with what both kinds of sets have."""
        return IndexedStatistics(
            name=name_of(self.part),
            counts=counts,
            stored_as=np.dtype(self.indexed.index.dtype).name,
            counted=counted,
            lengths=Histogram.of(sizes),
            median=int(np.median(sizes)),
            longest=int(sizes.max()),
            provenance=self.provenance,
        )


class IndexedSftPreview(IndexedPreview):
    """The packs of a fine-tuning set of Pai-Megatron-Patch."""

    def __init__(self, part: DataPart, indexed: IndexedDataset, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(part, indexed, tokenizer)
        self._length = int(self.sizes[0]) // 2
        self._source = IndexedSftSource(part.path, indexed, self._length, vocabulary_size(tokenizer))
        self._source.check()

    def shown(self, index: int) -> tuple[list[_Conversation], list[str]]:
        """Its conversations, without the padding."""
        conversations = self._conversations(index)
        padding = self._length - sum(len(ids) for ids, _ in conversations)
        return conversations, [f"and {padding:,} tokens of padding"] if padding else []

    def statistics(self, sequence_length: int) -> IndexedStatistics:
        """Figures of the set, which has a SEQ_LEN of its own."""
        sizes, learned = [], 0
        for index in range(len(self.sizes)):
            for ids, is_learned in self._conversations(index):
                sizes.append(len(ids))
                learned += int(is_learned.sum())
        counts = {
            f"samples of {self._length:,}": len(self.sizes),
            "conversations": len(sizes),
            "tokens": sum(sizes),
            "learned": learned,
        }
        return self.figures(counts, "conversation", np.array(sizes))

    def _conversations(self, index: int) -> list[_Conversation]:
        sample = self._source[index]
        assert sample.lengths is not None, "sets of this kind have them"
        borders = np.cumsum(sample.lengths.numpy())[:-1]
        # A label is learned one token before the token that it is.
        learned = np.concatenate(([False], sample.loss_mask.numpy()[:-1] > 0))
        ids = np.split(sample.tokens.numpy(), borders)
        has_padding = self.numbers(index, self._length)[-1] >= 0
        pairs = list(zip(ids, np.split(learned, borders), strict=True))
        return pairs[:-1] if has_padding else pairs


def open_preview(part: DataPart, tokenizer: PreTrainedTokenizerBase) -> IndexedPreview:
    """Open a set of either kind.

    Args:
        part: names the set.
        tokenizer: says what ids stand for.

    Raises:
        DataError: the files cannot be used, or were made with another vocabulary.
    """
    indexed = open_indexed(part.path)
    first = next(length for length in indexed.sequence_lengths if length)
    head = indexed.bin_reader.read(indexed.index.dtype, int(first), 0)
    kind = IndexedSftPreview if (head < 0).any() else IndexedPreview
    return kind(part, indexed, tokenizer)
