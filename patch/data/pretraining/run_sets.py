"""One set of a pre-training run: its files, the documents of a split, and their end token, all checked."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split
from transformers import PreTrainedTokenizerBase

from patch.config.data_spec import DataPart
from patch.config.schema import DataConfig, ModelConfig
from patch.data.pretraining.indexed_dataset import check_ids, open_indexed, total_tokens
from patch.data.pretraining.provenance import read_provenance
from patch.errors import DataError

UNSPLIT = "1"
_TOKENS_CHECKED = 1 << 24
_PURPOSE = {Split.train: "training", Split.valid: "validation"}


class PretrainOptions(NamedTuple):
    """How the sets of a run are read. Without a seed and a folder, only sizes can be read."""

    data: DataConfig
    model: ModelConfig
    """Decides the sequence length; ids beyond its vocabulary are refused."""
    tokenizer: PreTrainedTokenizerBase | None = None
    """A set that is known to have another vocabulary is refused. None skips this check."""
    seed: int = 0
    cache: Path = Path()
    """Folder of the index files, which locate each sample; all ranks must share it."""

    @property
    def split(self) -> str:
        """Shares of each set's documents for training, validation and neither."""
        return self.data.split or UNSPLIT


class RunSet(NamedTuple):
    """Documents of one set that a run trains on, or evaluates."""

    prefix: str
    eod: int | None
    """Id that ends its documents, or None."""
    indexed: IndexedDataset
    documents: range
    """Documents of the split. Upstream counts sequences instead, and a document may have several."""
    config: GPTDatasetConfig

    @property
    def tokens(self) -> int:
        """Tokens of these documents."""
        lengths = self.indexed.sequence_lengths[self.documents.start : self.documents.stop]
        return int(lengths.sum(dtype=np.int64))

    def samples(self, length: int) -> int:
        """Return the whole samples of `length` tokens in one pass."""
        return (self.tokens - 1) // length


def open_set(prefix: str, options: PretrainOptions, split: Split) -> RunSet:
    """Open a set's files and check the first token ids. The other ids are checked when they are read."""
    indexed = open_indexed(prefix)
    head = indexed.bin_reader.read(indexed.index.dtype, min(_TOKENS_CHECKED, total_tokens(indexed)), 0)
    check_ids(prefix, int(head.min()), int(head.max()), options.model.vocab_size)
    is_known = split is Split.valid and options.split != UNSPLIT  # it was opened for training
    eod = _end_of_document(prefix, indexed, options, warns=not is_known)
    config = GPTDatasetConfig(
        random_seed=options.seed,
        sequence_length=options.model.seq_length,
        blend=([prefix], None),
        split=options.split,
        path_to_cache=str(options.cache),
        tokenizer=_Vocabulary(prefix, options.model.vocab_size, eod),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=options.data.eod_mask_loss,
        create_attention_mask=False,
        drop_last_partial_validation_sequence=False,
    )
    opened = RunSet(prefix, eod, indexed, _documents(indexed, config, options, split), config)
    if opened.tokens < 2:
        raise DataError(
            f"{prefix}: --split {options.split} leaves {opened.tokens} tokens in {len(opened.documents)} of "
            f"{len(indexed)} documents for {_PURPOSE[split]}, expected at least two",
            field="split",
        )
    return opened


def train_samples(part: DataPart, options: PretrainOptions) -> int:
    """Return the samples of one pass over a training set. No index file is read or written.

    Raises:
        DataError: see `load_training`.
    """
    return max(1, open_set(part.path, options, Split.train).samples(options.model.seq_length))


def _documents(
    indexed: IndexedDataset, config: GPTDatasetConfig, options: PretrainOptions, split: Split
) -> range:
    """Return the documents of a split, by upstream's rule (blended_megatron_dataset_builder.py:441)."""
    shares = (0.0, 1.0) if options.split == UNSPLIT else config.split_matrix[split.value]
    first, last = (0, 0) if shares is None else (int(round(share * len(indexed))) for share in shares)
    return range(first, last)


def _end_of_document(
    prefix: str, indexed: IndexedDataset, options: PretrainOptions, *, warns: bool
) -> int | None:
    """Return the id that ends documents: from PREFIX.meta.json, or else the tokenizer's end-of-text token."""
    provenance = read_provenance(prefix, indexed, options.tokenizer, warns=warns)
    if provenance is not None:
        eod, why = provenance.eod, "was made with --no-append-eod"
    else:
        eod = None if options.tokenizer is None else options.tokenizer.eos_token_id
        why = "the tokenizer has no eos token"
    for field in ("reset_attention_mask", "eod_mask_loss"):
        if eod is None and getattr(options.data, field):
            raise DataError(f"{prefix}: no token ends its documents: {why}; expected one", field=field)
    return eod


class _Vocabulary:
    """The attributes of a tokenizer that GPTDataset reads."""

    pad = int(np.iinfo(np.int64).min)
    """Value that no token id can have, so that upstream never takes a token of the set for padding."""

    def __init__(self, prefix: str, vocab_size: int, eod: int | None) -> None:
        self.vocab_size, self.eod = vocab_size, eod
        file = Path(f"{prefix}.bin").stat()
        # Upstream names its index files by a hash of this and of the path. With size and time in the hash,
        # upstream does not use old index files after the data at the path has changed.
        self.unique_identifiers = {"bytes": file.st_size, "modified_ns": file.st_mtime_ns}
