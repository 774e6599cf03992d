"""Fine-tuning sets from rows: each sample is one padded sequence; the assistant's words are trained.

Several processes tokenize the rows, in order, in bounded memory.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from patch.config.choices import RowKind
from patch.config.data_spec import files_of, parse_columns
from patch.config.schema import DataConfig
from patch.data.chat_templates import ensure_chat_template
from patch.data.formats.turns import PLAIN
from patch.data.packing import packed_sample
from patch.data.readers.rows import Row, SetReader
from patch.data.rendering.bounded_process import BoundedMap
from patch.data.samples import Sample
from patch.data.sft.cache import TokenCache, TokenizedSet, TokenWriter, tokenized_in_memory
from patch.data.sft.options import origin_of
from patch.data.sft.report import SetReport
from patch.data.sft.rows import Item, RowTokenizer
from patch.data.tokenizer import padding_id
from patch.device import usable_cores
from patch.errors import DataError
from patch.preflight.data_record import SetRecord
from patch.progress import shown_progress
from patch.storage.places import StrPath

_ROWS_AT_ONCE = 256
_BYTES_AT_ONCE = 1 << 18
"""Limits of one batch. They also limit the memory: each worker has a batch, and a few more batches wait."""
_MOST_WORKERS = 32
"""Limit of the default, because one process reads the rows for all workers."""

class SftSource(Dataset[Sample]):
    """Tokenized conversations; a sample is padded when it is read.

    Args:
        tokens: 5 bytes per token; those of a token cache are mapped, not loaded.
        name: of the set, for `place` and messages.
        length: S, tokens of one sample.
        origin: what decides the tokens (see `origin_of`), with a hash of the rows if there is a cache.
    """

    is_shuffled = False

    def __init__(
        self,
        tokens: TokenizedSet,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        origin: dict[str, str],
    ) -> None:
        self._ids, self._learned = tokens.arrays["ids"], tokens.arrays["learned"]
        self._offsets = np.concatenate(([0], tokens.arrays["ends"]))
        self._length, self.padding, self._name = length, padding_id(tokenizer), name
        self.sizes = np.diff(self._offsets) - 1
        """int64 [N]: tokens of each conversation, without the last token, which is only a label."""
        self.report: SetReport = tokens.report
        self.num_learned = self.report.learned
        """Trained tokens. A first token is never a label."""
        self.fingerprint = sha256(f"{length} {sorted(tokens.sha256.items())}".encode()).hexdigest()
        """Hash that is equal on two machines if and only if their samples are equal, up to padding."""
        self._hash_of_sizes, self._origin = tokens.sha256["ends"], origin
        self._reads_clock = "strftime_now" in str(tokenizer.chat_template)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def record(self, path: str) -> SetRecord:
        """Return a record of the set, by which a resume notices changed tokens; `path` names the set."""
        return SetRecord(path, self.fingerprint, self._hash_of_sizes, self._origin, self._reads_clock)

    def __getitem__(self, index: int) -> Sample:
        return packed_sample(self, [index], self._length)._replace(lengths=None)

    def place(self, index: int) -> str:
        """See `SampleSource`. Count rows from 1 over all files, or samples if a row gave none or several."""
        found, kind = self.report.found
        is_row = not self.report.num_dropped and self.report.rows == found
        index //= 2 if self.report.pairs else 1
        return f"{self._name}: {'row' if is_row else kind[:-1]} {index + 1}"

    def conversation(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return read-only token ids, int32 [size + 1], and whether each is trained, bool [size + 1]."""
        part = slice(self._offsets[index], self._offsets[index + 1])
        return self._ids[part], self._learned[part]


def load_sft(
    path: StrPath,
    tokenizer: PreTrainedTokenizerBase,
    sequence_length: int,
    data: DataConfig = PLAIN,
    row_kind: RowKind = "conversation",
    cache_dir: StrPath | None = None,
) -> SftSource:
    """Read and tokenize a set of conversations: a file, or the files of a folder or a glob.

    With a token cache this happens once for the same rows, tokenizer and settings. Later calls
    map the tokens, also in other processes and runs. The log reports on the rows. Time and memory are
    bounded for each row, however long it is.

    Args:
        path: rows (see `files_of`) in one of the formats of `to_conversation`.
        tokenizer: gets the chat template of `data`, see `ensure_chat_template`.
        sequence_length: tokens of one sample; the labels are shifted by one token.
        data: settings of rows and processes.
        row_kind: a pair gives two sequences; the label of an unpaired answer is in its first token.
        cache_dir: folder of the token cache, or None to keep the tokens in memory.
    Raises:
        DataError: see `read_rows`, `to_conversation`, `ChatRenderer`; the tokenizer fails; the cache cannot
            be written; no row gives a sample; or more than `data.max_dropped_share` of the rows give none.
    """
    ensure_chat_template(tokenizer, data.chat_template, data.chat_template_kwargs)
    data = replace(data, max_padding_length=sequence_length)
    name, files = str(path), files_of(str(path))
    cache = None if cache_dir is None else TokenCache(Path(cache_dir))
    hashes = _hash(files, cache)

    def build(writer: TokenWriter) -> SetReport:
        report = tokenize(files, name, tokenizer, data, row_kind, writer)
        report.refuse_empty(name)
        for file, before, after in zip(files, hashes, _hash(files, cache), strict=cache is not None):
            if before != after:
                raise DataError(f"{file} has changed while it was read; start again when it is complete")
        return report

    key, origin = origin_of(hashes, tokenizer, data, row_kind)
    tokens = tokenized_in_memory(build) if cache is None else cache.get(key, name, build)
    tokens.report.log(name, data.max_dropped_share)
    return SftSource(tokens, name, tokenizer, sequence_length, origin)


def is_cached(
    path: StrPath,
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    row_kind: RowKind,
    cache_dir: StrPath,
) -> bool:
    """Return whether `load_sft` would find the set in the token cache, without reading a file of rows again.
    The tokenizer must already have its chat template.

    Raises:
        DataError: there is no such file.
    """
    files, cache = files_of(str(path)), TokenCache(Path(cache_dir))
    named = zip(names_of(files), map(cache.hashes.remembered, files), strict=True)
    hashes = [(name, digest) for name, digest in named if digest is not None]
    key, _ = origin_of(hashes, tokenizer, data, row_kind)
    return len(hashes) == len(files) and cache.has(key)


def _hash(files: list[Path], cache: TokenCache | None) -> list[tuple[str, str]]:
    """Return each file's name in the report and the hash of its content, or an empty list without a cache."""
    for file in files:
        if file.exists() and not file.is_file():
            raise DataError(f"{file}: is a pipe or a device, expected a file of rows")
    try:
        digests = [] if cache is None else [cache.hashes.sha256(file) for file in files]
        return list(zip(names_of(files), digests, strict=False))
    except OSError as error:
        raise DataError(
            f"{error.filename}: cannot be read: {error.strerror}; expected a file of rows"
        ) from error


def tokenize(
    files: Sequence[Path],
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    row_kind: RowKind,
    writer: TokenWriter,
) -> SetReport:
    """Tokenize the rows of files to samples, write the samples, and return the report.

    Raises:
        DataError: a row cannot be read, has no known format, or cannot be rendered or encoded.
        TrainingError: the processes cannot be started.
        OSError: the samples cannot be written.
    """
    report = SetReport(
        data.max_padding_length,
        data.long_samples,
        data.allow_special_tokens,
        row_kind == "pair",
        unseen_columns=dict(parse_columns(data.columns)),
    )
    names = dict(zip(files, names_of(files), strict=True))

    def item(file: Path, row: Row) -> tuple[Item, int]:
        value = pickle.dumps(row.value)
        return Item(f"{file}: {row.place}", names[file] + row.place, value), len(value)

    reader = SetReader(files, item, _ROWS_AT_ONCE, _BYTES_AT_ONCE)
    tokenized = start_workers(tokenizer, data, row_kind)
    with shown_progress(f"tokenizing {name}", 1) as show:
        for items, rows in tokenized(reader.batches()):
            for item_of_row, row in zip(items, rows, strict=True):
                report.add(item_of_row.place, row)
            writer.write(
                b"".join(row.ids for row in rows),
                b"".join(row.learned for row in rows),
                [size for row in rows for size in row.sizes],
            )
            writer.share = reader.share
            show(reader.share, f"{report.rows} rows")
    return report


def start_workers(tokenizer: PreTrainedTokenizerBase, data: DataConfig, row_kind: RowKind) -> BoundedMap:
    """Start the processes that map lists of `Item`s to `TokenizedRow`s. The map raises a DataError for a row
    that has no known format, or cannot be rendered or encoded.

    Raises:
        TrainingError: the processes cannot be started.
    """
    work = RowTokenizer(tokenizer, data, row_kind)
    processes = data.data_workers or min(_MOST_WORKERS, usable_cores())
    return BoundedMap(work, processes, error=work.renderer.child_error)


def names_of(files: Sequence[Path]) -> list[str]:
    """Return the text before "line 7" in the report, for each file of a set: nothing if there is one file."""
    if len(files) == 1:
        return [""]
    folder = Path(os.path.commonpath([file.parent for file in files]))
    return [f"{file.relative_to(folder)}: " for file in files]
