"""How many samples a run's training sets have, as far as that can be known before the run.

The samples of .bin/.idx follow from the .idx. Those of rows are known once the set is tokenized: the token
cache tells them, and a small set is tokenized at once.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from patch.config.data_spec import DataPart, files_of
from patch.config.schema import DataConfig, ModelConfig
from patch.data.packing import pack
from patch.data.sft.options import sft_options
from patch.data.sft.source import find_sft, load_sft

_SMALL_BYTES = 1 << 20
"""Of a set whose rows are tokenized here: a second or two."""


def known_samples(
    part: DataPart,
    data: DataConfig,
    model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    sft: bool,
    fallback_cache: Path,
) -> int | None:
    """Samples of one pass over a training set, as the run counts them; None if that is not known.

    No file is written.

    Args:
        part: the set.
        data: the run's settings.
        model: vocabulary and sequence length.
        tokenizer: the run's, with its chat template.
        sft: .bin/.idx hold conversations, not documents to learn as a whole.
        fallback_cache: see `sft_options`.

    Raises:
        DataError: the set cannot be used; of rows that are not read this is not known.
    """
    if data.dataset_type == "raw":
        return _of_rows(part.path, data, tokenizer, fallback_cache)
    # These import megatron-core, which raw rows do not need.
    if sft:
        from patch.data.pretraining.indexed_sft import load_indexed_sft

        length, rows = model.seq_length, model.vocab_size
        return len(load_indexed_sft(part.path, tokenizer, sequence_length=length, vocab_size=rows))
    from patch.data.pretraining.run_sets import train_samples

    return train_samples(part, data, model, tokenizer)


def _of_rows(
    path: str, data: DataConfig, tokenizer: PreTrainedTokenizerBase, fallback_cache: Path
) -> int | None:
    options, length = sft_options(data, fallback_cache), data.max_padding_length
    source = find_sft(Path(path), tokenizer, length, options)
    if source is None:
        if sum(file.stat().st_size for file in files_of(path, "train_data_path")) > _SMALL_BYTES:
            return None
        source = load_sft(Path(path), tokenizer, length, replace(options, cache_dir=None))
    return len(pack(source.sizes, length)) if data.packing else len(source)
