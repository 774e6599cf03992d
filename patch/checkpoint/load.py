"""Loads checkpoints: everything is checked on all ranks before upstream writes into the model.

A load that fails inside upstream leaves tensors zeroed or half read, so every name, shape, dtype and file
size is checked before. The loading run may have any layout (TP, PP, DP).
"""

from __future__ import annotations

import io
import pickle
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from patch.checkpoint.compatibility import NO_CURES, Cure, check_files, check_fit, check_weights
from patch.checkpoint.failures import checkpoint_failures
from patch.checkpoint.folder import iteration_folder
from patch.checkpoint.reader import WindowReader
from patch.checkpoint.sharded_tensors import copied, index_key, shards_of
from patch.compat.load_reader import reading_with
from patch.compat.unpickle import load_plain, plain_readers, read_metadata
from patch.distributed.collectives import all_gather_object
from patch.errors import CheckpointError
from patch.logger import get_logger
from patch.storage.names import COMMON_FILE, METADATA_FILE, METADATA_JSON_FILE
from patch.storage.places import AnyPath
from patch.storage.remote import RemotePath
from patch.storage.text_files import read_small

_logger = get_logger(__name__)
_MOST_COMMON_BYTES = 1 << 30


def load_checkpoint(
    root: AnyPath, iteration: int, sharded_state: dict[str, Any], cures: Mapping[str, Cure] = NO_CURES
) -> dict[str, Any]:
    """Load the sections in `sharded_state` in place; a collective over all ranks.

    Args:
        root: the folder of a run's checkpoints.
        iteration: the iteration of the checkpoint.
        sharded_state: sections as given to save_checkpoint, in any layout. Sections that are left out are not
            read: {"model": ...} loads only the weights.
        cures: prefix of tensor names -> what a user can do if such a tensor is missing or unexpected. The
            first prefix that matches is used. The caller gives them, because it knows its tensors and flags.

    Returns:
        The same nesting with tensors and objects instead of shards, and the common state added.

    Raises:
        CheckpointError: on all ranks: the checkpoint is missing, damaged, contains code, or does not fit the
            state (the message names the tensor and both shapes). The state is unchanged unless reading the
            tensors failed.
    """
    folder = iteration_folder(root, iteration)
    with checkpoint_failures(f"checkpoint {folder} was not loaded"):
        read_common(root, iteration)
        index = read_metadata(folder / METADATA_FILE)
        if dist.get_rank() == 0:
            check_files(folder, index)
        shards = shards_of(sharded_state)
    requested = set().union(*all_gather_object({index_key(shard) for shard in shards}))
    with checkpoint_failures(f"checkpoint {folder} was not loaded"):
        check_fit(folder, index, shards, requested, cures)
    failure = f"checkpoint {folder} failed while it was read, the model in memory is unusable"
    reader = WindowReader(folder, index)
    with (
        checkpoint_failures(failure), _for_upstream(folder) as local, plain_readers(), reading_with(reader)
    ):  # fmt: skip
        # Overlapping or incomplete shards are no error of a load, and upstream would raise on rank 0 only.
        loaded = dist_checkpointing.load(
            copied(_without_absent_extra_state(sharded_state, index)),
            str(local),
            validate_access_integrity=False,
        )
    return loaded


def load_only_weights(
    folder: AnyPath,
    sharded_state: dict[str, Any],
    *,
    prefixes: tuple[str, ...],
    vocab_size: int,
    cures: Mapping[str, Cure] = NO_CURES,
) -> None:
    """Load a model's weights in place, from any checkpoint with megatron-core's keys; a collective.

    Unlike a resume, this accepts weights of another dtype (they are rounded to nearest even, with a warning)
    and another vocabulary padding, and ignores everything else in the checkpoint.

    Args:
        folder: the folder of the checkpoint itself (see `weights_folder`).
        sharded_state: the model's section, in any layout.
        prefixes: prefixes of the names of a model's tensors; the checkpoint's other tensors are ignored.
        vocab_size: rows of the vocabulary without padding; the checkpoint must have at least these.
        cures: see `load_checkpoint`.

    Raises:
        CheckpointError: see `load_checkpoint`.
    """
    with checkpoint_failures(f"weights of {folder} were not loaded"):
        index = read_metadata(folder / METADATA_FILE)
        if dist.get_rank() == 0:
            check_files(folder, index)
        shards = shards_of(sharded_state)
    requested = set().union(*all_gather_object({index_key(shard) for shard in shards}))
    with checkpoint_failures(f"weights of {folder} were not loaded"):
        check_weights(folder, index, shards, requested, prefixes=prefixes, vocab_size=vocab_size, cures=cures)
    _warn_of_rounding(folder, index, shards)
    failure = f"{folder} failed while it was read, the model in memory is unusable"
    reader = WindowReader(folder, index)
    with (
        checkpoint_failures(failure), _for_upstream(folder) as local, plain_readers(), reading_with(reader)
    ):  # fmt: skip
        dist_checkpointing.load(
            copied(_without_absent_extra_state(sharded_state, index)),
            str(local),
            common_strategy=_NoCommon(),
            validate_access_integrity=False,
        )


@contextmanager
def _for_upstream(folder: AnyPath) -> Iterator[Path]:
    """A folder on the disk with the files that upstream opens itself, which are small."""
    if isinstance(folder, Path):
        yield folder
        return
    with tempfile.TemporaryDirectory() as local:
        for name in (COMMON_FILE, METADATA_JSON_FILE):
            if (folder / name).is_file():
                (Path(local) / name).write_bytes(read_small(folder / name, _MOST_COMMON_BYTES))
        yield Path(local)


class _NoCommon(TorchCommonLoadStrategy):
    """Does not read common.pt, where Megatron-LM stores objects of its own classes."""

    def load_common(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """An empty common state."""
        return {}


def _warn_of_rounding(folder: AnyPath, index: Metadata, shards: list[ShardedBase]) -> None:
    """Log a warning if stored weights are rounded to the run's dtype."""
    wanted = {shard.key: shard.dtype for shard in shards if isinstance(shard, ShardedTensor)}
    stored = {
        metadata.properties.dtype
        for key, dtype in wanted.items()
        if isinstance(metadata := index.state_dict_metadata[key], TensorStorageMetadata)
        and metadata.properties.dtype != dtype != torch.float32
    }
    if stored:
        _logger.warning(
            "weights stored as %s in %s are rounded to %s (PR, --precision)",
            ", ".join(sorted(map(str, stored))), folder, next(iter(wanted.values())),
        )  # fmt: skip


def read_common(root: AnyPath, iteration: int) -> dict[str, Any]:
    """The plain values that were saved with the tensors; not a collective.

    Raises:
        CheckpointError: the file is missing, damaged, or contains more than plain values.
    """
    path = iteration_folder(root, iteration) / COMMON_FILE
    try:
        common = load_plain(io.BytesIO(read_small(path, _MOST_COMMON_BYTES)), map_location="cpu")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing: there is no complete checkpoint") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path} contains more than plain values and was not read") from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        if isinstance(path, RemotePath) and isinstance(error, OSError):
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}") from error
    if not isinstance(common, dict):
        raise CheckpointError(f"{path} is damaged: it contains a {type(common).__name__}, expected a dict")
    return common


def _without_absent_extra_state(sharded_state: dict[str, Any], index: Metadata) -> dict[str, Any]:
    """A copy of the state without those `_extra_state` objects (FP8 scales) that the checkpoint lacks."""
    kept, _ = extract_matching_values(
        sharded_state,
        lambda value: not isinstance(value, ShardedObject) or value.unique_key in index.state_dict_metadata,
    )
    return kept
