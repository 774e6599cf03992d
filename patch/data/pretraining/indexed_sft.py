"""Fine-tuning sets as .bin/.idx, in the layout of Pai-Megatron-Patch's toolkits/sft_data_preprocessing.

With S = SEQ_LEN, a document has 2 S numbers: S token ids, then S labels. A label is the id that follows, or
-100 without a loss. The last id of each conversation is stored as -1 - id, so a document may be a pack of
several conversations. Padding follows the last conversation. The files contain neither S nor the tokenizer,
so each document is checked when it is read: a trained label is the next token of the same conversation.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset
from transformers import PreTrainedTokenizerBase

from patch.config.schema import ModelConfig
from patch.data.pretraining.indexed_dataset import check_ids, open_indexed
from patch.data.pretraining.provenance import read_provenance
from patch.data.samples import Sample, lengths_between
from patch.errors import DataError
from patch.logger import get_logger

_logger = get_logger(__name__)

_NOT_LEARNED = -100
_NUMBERS_CHECKED = 1 << 22
"""Numbers checked at the start of a run; the other numbers are checked when they are read."""


class IndexedSftSource:
    """Documents of such a set, in order. The conversations of a pack are separate sequences."""

    is_shuffled = False

    def __init__(self, prefix: str, indexed: IndexedDataset, sequence_length: int, vocab_size: int) -> None:
        self._prefix, self._indexed = prefix, indexed
        self._length, self._vocab_size = sequence_length, vocab_size

    def __len__(self) -> int:
        return len(self._indexed)

    def __getitem__(self, index: int) -> Sample:
        document = torch.from_numpy(self._indexed[index].astype(np.int64))
        stored, labels = document[: self._length], document[self._length :]
        ends, learned = stored < 0, labels != _NOT_LEARNED
        tokens = torch.where(ends, -1 - stored, stored)
        labels = labels.where(learned, 0)
        check_ids(self._prefix, int(labels.min()), int(max(labels.max(), tokens.max())), self._vocab_size)
        follows = torch.zeros_like(learned)
        follows[:-1] = (labels[:-1] == tokens[1:]) & ~ends[:-1]
        if (learned & ~follows).any():
            place = int((learned & ~follows).nonzero()[0])
            self._refuse(f"document {index + 1}: label {place + 1} is not the next token of its conversation")
        return Sample(tokens, labels, learned.float(), lengths_between(ends))

    def place(self, index: int) -> str:
        """See `SampleSource`."""
        return f"{self._prefix}: document {index + 1}"

    def check(self) -> None:
        """Check the sizes of all documents, and the contents of the first documents.

        Raises:
            DataError: the set has another SEQ_LEN or another layout.
        """
        if np.issubdtype(self._indexed.index.dtype, np.unsignedinteger):
            self._refuse(f"ids of type {self._indexed.index.dtype.__name__}, which cannot hold -100")
        sizes = self._indexed.sequence_lengths
        smallest, largest = int(sizes.min()), int(sizes.max())
        if smallest == largest and largest % 2 == 0 and largest != 2 * self._length:
            raise DataError(
                f"{self._prefix}: documents of {largest} numbers, expected {2 * self._length}: the set was "
                f"made for sequences of {largest // 2}, this run has {self._length}",
                field="seq_length",
            )
        if smallest != largest or largest % 2:
            self._refuse(f"documents of {smallest} to {largest} numbers")
        for index in range(min(len(self), _NUMBERS_CHECKED // largest + 1)):
            self[index]

    def _refuse(self, found: str) -> NoReturn:
        raise DataError(
            f"{self._prefix}: {found}; expected a fine-tuning set of Pai-Megatron-Patch's "
            f"sft_data_preprocessing: documents of {self._length} ids and {self._length} labels "
            "(pre-training sets: SFT=false; rows: MP_DATASET_TYPE=raw)",
            field="dataset_type",
        )


def load_indexed_sft(
    prefix: str, tokenizer: PreTrainedTokenizerBase, model: ModelConfig
) -> IndexedSftSource:
    """Open a fine-tuning set in .bin/.idx; `prefix` is the path of the two files without their endings.

    Raises:
        DataError: files are missing or damaged, of another SEQ_LEN, another vocabulary, or of another kind.
    """
    indexed = open_indexed(prefix)
    read_provenance(prefix, indexed, tokenizer)
    source = IndexedSftSource(prefix, indexed, model.seq_length, model.vocab_size)
    source.check()
    _logger.info("%s: %d samples of %d tokens", prefix, len(source), model.seq_length)
    return source
