"""Converts files, in one process and without building the model: a Hugging Face folder <-> a checkpoint.

Layout of a checkpoint made from a Hugging Face folder:

DIR/release/                            the checkpoint; loads at any TP, PP, VPP, and in upstream's GPTModel
DIR/latest_checkpointed_iteration.txt   "release": Megatron-LM's word for weights without a training state
DIR/config.json, tokenizer, ...         copies; model.safetensors.index.json records the layout of the source
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import chain, cycle, product
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import torch

from patch.checkpoint.data_files import PieceWriter
from patch.checkpoint.folder import unverified_weights
from patch.checkpoint.stored import Piece
from patch.config.schema import ModelConfig
from patch.convert import further_tokens
from patch.convert.hf_config_files import (
    copy_descriptions,
    model_of,
    read_step,
    stated_dtype,
    tokenizer_of,
    write_config,
    write_descriptions,
    write_tokenizer,
)
from patch.convert.hf_layout import remember_layout, write_like
from patch.convert.hf_reader import HFFolder, open_checked
from patch.convert.mappings import TPShard, WeightMapping
from patch.convert.merge import merge_adapter
from patch.convert.stored_weights import StoredWeights
from patch.convert.target_folder import publish, staging, writing
from patch.convert.weight_table import CheckpointLocation, checkpoint_location, weights_table
from patch.device import device_setter
from patch.errors import ConversionError
from patch.families.adapters import hf_tensors
from patch.preflight.model_of_folder import has_hf_config, run_behind
from patch.progress import progress
from patch.storage.names import (
    BEST_LINK,
    CONFIG_FILE,
    RELEASE,
    TRACKER,
    is_complete,
    is_released,
    iteration_of,
)
from patch.storage.places import AnyPath, StrPath, any_path, local_path
from patch.storage.remote import RemotePath

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Item = TypeVar("_Item")
WINDOW_BYTES = 16 * 2**20
"""Largest piece, unless one row is larger; bounds the memory of a conversion."""


def hf_to_mcore(
    source: StrPath, target: StrPath, dtype: torch.dtype | None = None, *, overwrite: bool = False
) -> None:
    """Convert a Hugging Face folder to a checkpoint; on failure the target is unchanged.

    Args:
        source: a Hugging Face folder (safetensors or .bin).
        target: a new or empty folder.
        dtype: the dtype of all weights, or None if each keeps its own.
        overwrite: replace a converted checkpoint at `target`.
    Raises:
        ConversionError: the source cannot be read or is not supported, or the target cannot be written.
    """
    source, target = local_path(source).resolve(), local_path(target).resolve()
    if not source.is_dir():
        raise ConversionError(f"{source}: no such folder, expected a Hugging Face folder (--load)")
    if is_released(source):
        raise ConversionError(
            f"{source} is a converted checkpoint, expected a Hugging Face folder (--load): mcore2hf turns it "
            "back into one"
        )
    model = model_of(source)
    folder = open_checked(source, model, dtype, "--params-dtype")
    with staging(target, [source], overwrite=overwrite, kind="converted checkpoint") as partial:
        _write_checkpoint(folder, partial / RELEASE, model, dtype)
        with writing(partial):
            copy_descriptions(source, partial)
            further_tokens.keep(folder, partial)
            write_tokenizer(partial, None, read_step(source))
            if dtype is not None:
                write_config(partial, model, source, dtype, predicts_further=bool(folder.further))
            remember_layout(folder, partial)
            (partial / TRACKER).write_text(f"{RELEASE}\n")
        publish(target, "checkpoint")


def _write_checkpoint(source: HFFolder, target: Path, model: ModelConfig, dtype: torch.dtype | None) -> None:
    total_bytes = sum(
        torch.Size(shape).numel() * (dtype or source.dtype_of(name)).itemsize
        for name, shape in source.tensors
    )
    with writing(target):
        target.mkdir()
        with closing(PieceWriter(target)) as writer:
            with progress(f"{source.folder.name} to megatron-core", total_bytes) as advance:
                for piece, shape in _prefetched(_read_pieces(source, model, dtype)):
                    writer.add(piece, shape)
                    advance(piece.tensor.nbytes)
            for key in _extra_states(model):
                writer.add_object(key, None)
            writer.finish({"iteration": 0, "checkpoint_version": 3.0})


def _read_pieces(
    source: HFFolder, model: ModelConfig, dtype: torch.dtype | None
) -> Iterator[tuple[Piece, tuple[int, ...]]]:
    """Yield windows of rows of all parameters, with the shape of the stored tensor, which stacks copies.
    Pieces alternate between two buffers: a piece is valid until the next but one (see `_prefetched`).
    """
    buffers = cycle(np.empty((2, WINDOW_BYTES), np.uint8))
    for name, any_copy in weights_table(model, model.padded_vocab_size(1)).items():
        shape = any_copy.shape
        num_rows, *rest = shape
        by_key: dict[str, list[tuple[CheckpointLocation, WeightMapping]]] = {}
        for copy in any_copy.copies:
            place = checkpoint_location(name, *copy, model)
            by_key.setdefault(place.key, []).append((place, any_copy.at(*copy)))
        for copies in by_key.values():
            names = [tensor.name for _, each in copies for tensor in each.hf]
            kind = (None if any_copy.is_buffer else dtype) or _common_type(source, names)
            row_bytes = torch.Size(rest).numel() * kind.itemsize
            step = max(1, WINDOW_BYTES // row_bytes)
            for ((key, lead, sizes), mapping), start in product(copies, range(0, num_rows, step)):
                count = min(step, num_rows - start)
                # The storage must be no larger than the tensor: torch.save writes whole storages.
                window = torch.from_numpy(next(buffers)[: count * row_bytes]).view(kind).view(count, *rest)
                slices = [source[tensor.name] for tensor in mapping.hf]
                mapping.hf_to_megatron(window, slices, TPShard(0, 1), start)
                piece = window.view(*[1] * len(lead), count, *rest)
                yield Piece(key, (*lead, start, *[0] * len(rest)), piece), (*sizes, *shape)


def _extra_states(model: ModelConfig) -> list[str]:
    """Return the keys of the linear layers' (empty) extra states, which upstream's strict load requires."""
    found: list[tuple[int, str]] = []
    for name, mapping in weights_table(model).items():
        if "*" in name and ".linear_" in name and name.endswith(".weight"):
            for copy in mapping.copies:
                key, index, sizes = checkpoint_location(name, *copy, model)
                shard = "_".join(".".join(map(str, axes)) for axes in (index or (0,), sizes or (1,)))
                found.append((copy[0], f"{key.removesuffix('weight')}_extra_state/shard_{shard}"))
    return [key for _, key in sorted(found, key=itemgetter(0))]


def _common_type(source: HFFolder, names: list[str]) -> torch.dtype:
    """Return the dtype of a parameter's tensors, which are stored as one tensor.
    Raise ConversionError if the dtypes differ.
    """
    first_of = {source.dtype_of(name): name for name in reversed(names)}
    if len(first_of) > 1:
        listed = ", ".join(f"{name} {kind}" for kind, name in sorted(first_of.items(), key=str))
        raise ConversionError(
            f"{source.folder}: {listed} make up one stored tensor, expected one type: give --params-dtype"
        )
    return source.dtype_of(names[0])


def _prefetched(items: Iterator[_Item]) -> Iterator[_Item]:
    """Yield the same items; while the caller uses an item, a thread makes the next item."""
    with ThreadPoolExecutor(1, initializer=device_setter()) as pool:
        following = pool.submit(next, items, None)
        while (item := following.result()) is not None:
            following = pool.submit(next, items, None)
            yield item


class _ModelSource(NamedTuple):
    """The model of a checkpoint, and the origin of its configuration and tokenizer."""

    model: ModelConfig
    folder: Path | None
    """A folder with config.json and usually the tokenizer, or None."""
    tokenizer: PreTrainedTokenizerBase | None
    """The tokenizer of the training run, or None to copy the tokenizer files of the folder."""


def mcore_to_hf(
    source: StrPath | RemotePath,
    target: StrPath,
    hf_config: StrPath | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Convert a checkpoint to a Hugging Face folder; on failure the target is unchanged.

    Args:
        source: a converted folder, a run's folder, its checkpoint/, one checkpoint in it, a checkpoint of
            Megatron-LM, or the URL of a run's checkpoints in a store.
        target: a new or empty folder.
        hf_config: a Hugging Face folder with configuration, tokenizer and file layout; None: use `source`.
        overwrite: replace a Hugging Face model at `target`.
    Raises:
        CheckpointError: the checkpoint is damaged.
        ConversionError: the source cannot be read or is of another model, or the target cannot be written.
        OSError: a store does not answer.
    """
    source = source if isinstance(source, RemotePath) else any_path(str(source))
    source, target = source.resolve() if isinstance(source, Path) else source, local_path(target).resolve()
    if not source.is_dir():
        is_best = source.name == BEST_LINK
        advice = "; without validation data no checkpoint is the best: take the run's folder" * is_best
        raise ConversionError(f"{source}: no such folder, expected a checkpoint (--load){advice}")
    described = _find_model_source(source, None if hf_config is None else local_path(hf_config))
    if described is None:
        merge_adapter(hf_config, str(source), target, overwrite=overwrite)
        return
    folder, verify = unverified_weights(source)
    step = iteration_of(folder)
    sources = [path for path in (source, described.folder) if isinstance(path, Path)]
    with ThreadPoolExecutor(1, initializer=device_setter()) as pool:
        verified = pool.submit(verify)
        try:
            weights = StoredWeights(folder, described.model)
            with staging(target, sources, overwrite=overwrite) as partial:
                stored, title = weights.dtypes, f"{folder.name} to Hugging Face"
                dtypes = {tensor: stored[tensor.name] for tensor in hf_tensors(described.model)}
                kept, kept_blocks = further_tokens.kept(described.folder)
                with writing(partial):
                    blocks = chain(weights.blocks(), kept_blocks)
                    write_like(described.folder, partial, dtypes | kept, blocks, title)
                    model, origin, tokenizer = described
                    is_source = hf_config is None and folder.name == RELEASE  # from hf2mcore
                    stated = stated_dtype(stored.values(), origin, is_source=is_source)
                    if is_source and origin is not None:
                        step = read_step(origin)
                    write_descriptions(
                        partial, model, origin, tokenizer, stated, step, predicts_further=bool(kept)
                    )
                verified.result()
                publish(target, "Hugging Face folder", step)
        except Exception:
            verified.result()  # a damaged source may be the cause
            raise


def _find_model_source(source: AnyPath, hf_config: Path | None) -> _ModelSource | None:
    """Return the model from --hf-config, config.json beside the weights, or the run that wrote them.
    Return None if that run has trained adapters.
    """
    folder, home = hf_config, source
    if isinstance(source, Path):
        home = source.parent if is_complete(source) and not has_hf_config(source) else source
        folder = hf_config or (home if isinstance(home, Path) and has_hf_config(home) else None)
    run = None if folder is not None and folder != hf_config else run_behind(str(home))
    if run is not None and run.adapter.is_on:
        return None
    if folder is not None:
        return _ModelSource(model_of(folder), folder, None)
    if run is None and (home / CONFIG_FILE).is_file():
        raise ConversionError(f"{source} is a run that saved no checkpoint; repeat its command")
    if run is None:
        raise ConversionError(
            f"{source} holds neither config.json nor a run's config.yaml, expected a description of the "
            "model: give a Hugging Face folder with --hf-config"
        )
    load = run.checkpoint.load
    origin = Path(load) if load is not None and has_hf_config(load) else None
    otherwise = "give the Hugging Face folder it began with as --hf-config"
    return _ModelSource(run.model, origin, tokenizer_of(run, otherwise))
