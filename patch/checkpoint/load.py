"""Loads checkpoints; all ranks check everything before a value of the model changes.

A load that fails in the middle leaves tensors half read. So all names, shapes, dtypes and file sizes are
checked first. The loading run may have any layout (TP, PP, DP): each rank reads its part of each tensor.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, extract_matching_values, merge
from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    apply_factory_merges,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from patch.checkpoint.folder import iteration_folder
from patch.checkpoint.sharded_tensors import (
    WeightsOnly,
    check_files,
    check_fit,
    copied,
    index_key,
    shards_of,
)
from patch.checkpoint.stored import MOST_COMMON_BYTES, Box, TorchDistReader
from patch.compat.unpickle import load_plain, read_metadata
from patch.device import is_finite
from patch.distributed.collectives import all_gather_object, fail_together
from patch.errors import CheckpointError
from patch.logger import get_logger
from patch.memory.disk import is_on_disk, write_values
from patch.storage.names import COMMON_FILE, COMMON_KEY, METADATA_FILE
from patch.storage.places import AnyPath
from patch.storage.remote import RemotePath
from patch.storage.text_files import read_small

_logger = get_logger(__name__)


def load_checkpoint(root: AnyPath, iteration: int, sharded_state: dict[str, Any]) -> dict[str, Any]:
    """Load the sections in `sharded_state` in place; a collective over all ranks.

    Args:
        root: the folder of a run's checkpoints.
        sharded_state: sections as given to save_checkpoint, in any layout. Omitted sections are not read:
            {"model": ...} loads only the weights.
    Returns:
        the same nesting with tensors and objects instead of shards, and the common state added.
    Raises:
        CheckpointError: on all ranks: the checkpoint is missing, damaged, contains code, or does not fit (the
            message names the tensor and both shapes). The state is unchanged unless reading tensors failed.
    """
    folder = iteration_folder(root, iteration)
    with fail_together(f"checkpoint {folder} was not loaded", CheckpointError):
        common = read_common(root, iteration)
    merge(common, _load(folder, sharded_state))
    return common


def load_only_weights(
    folder: AnyPath,
    sharded_state: dict[str, Any],
    *,
    prefixes: tuple[str, ...],
    vocab_size: int,
) -> None:
    """Load a model's weights in place, from any checkpoint with megatron-core's keys; a collective.

    Unlike a resume, this accepts another vocabulary padding, and another dtype (rounded to nearest even, with
    a warning). Errors are those of `load_checkpoint`.

    Args:
        folder: the folder of the checkpoint itself (see `weights_folder`).
        sharded_state: the model's section, in any layout.
        prefixes: name prefixes of a model's tensors; other tensors of the checkpoint are ignored.
        vocab_size: rows of the vocabulary without padding; the least that the checkpoint must have.
    """
    _load(folder, sharded_state, WeightsOnly(prefixes, vocab_size))


def _load(
    folder: AnyPath, sharded_state: dict[str, Any], weights: WeightsOnly | None = None
) -> dict[str, Any]:
    """Check and load shards in place; return the nesting with tensors and objects. A collective."""
    with fail_together(f"checkpoint {folder} was not loaded", CheckpointError):
        index = read_metadata(folder / METADATA_FILE)
        if dist.get_rank() == 0:
            check_files(folder, index)
        reader = TorchDistReader(folder, index)
        shards = shards_of(sharded_state)
    requested = set().union(*all_gather_object({index_key(shard) for shard in shards}))
    with fail_together(f"checkpoint {folder} was not loaded", CheckpointError):
        check_fit(folder, index, shards, requested, weights)
    if weights is not None:
        _warn_of_rounding(folder, index, shards)
    failure = f"checkpoint {folder} failed while it was read, the model in memory is unusable"
    with fail_together(failure, CheckpointError):
        try:
            state = _filled(reader, _without_absent_extra_state(sharded_state, index))
            if weights is not None:
                _refuse_non_finite(shards)
            return state
        except CheckpointError as error:
            raise CheckpointError(f"{failure}: {error}") from error


def _filled(reader: TorchDistReader, sharded_state: dict[str, Any]) -> dict[str, Any]:
    """Read all values of the shards, as megatron-core's load does (dist_checkpointing/serialization.py:55).
    Upstream reads through torch's planner. Here no rank waits for another, and only our readers unpickle.
    """
    state, _, factories = load_preprocess(copied(sharded_state))
    targets = []

    def value_of(shard: ShardedBase) -> Any:
        if isinstance(shard, ShardedObject):
            return reader.read_object(shard.unique_key)
        assert isinstance(shard, ShardedTensor), "factories are expanded"
        if shard.data is None:
            shard.init_data("cpu")
        data = shard.data.detach()
        if shard.allow_shape_mismatch:  # the stored tensor may have fewer rows
            data.zero_()
        stacked = data[(None,) * shard.prepend_axis_num]  # stacked layers have a leading axis
        targets.append((shard.key, Box(tuple(shard.global_offset), tuple(stacked.shape)), stacked))
        return data

    loaded = dict_list_map_outplace(value_of, extract_sharded_base(state)[0])
    reader.fill(target for target in targets if not is_on_disk(target[2]))
    for key, box, target in targets:
        if is_on_disk(target):  # one part at a time, to bound memory
            write_values(target, reader.read(key, box).to(target.dtype))
    return apply_factory_merges(loaded, factories)


def _refuse_non_finite(shards: list[ShardedBase]) -> None:
    for shard in shards:
        data = shard.data.detach() if isinstance(shard, ShardedTensor) and shard.data is not None else None
        if data is not None and data.itemsize > 1 and not is_on_disk(data) and not is_finite(data):
            raise CheckpointError(
                f"{shard.key} has values that are NaN or infinite, expected finite ones: take an earlier step"
            )


def _warn_of_rounding(folder: AnyPath, index: Metadata, shards: list[ShardedBase]) -> None:
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
    """Return the plain values that were saved with the tensors; not a collective.

    Raises:
        CheckpointError: they are missing, damaged, or contain other types.
    """
    folder = iteration_folder(root, iteration)
    path = folder / COMMON_FILE
    try:
        if path.is_file():
            common = load_plain(io.BytesIO(read_small(path, MOST_COMMON_BYTES)), map_location="cpu")
        else:
            common = TorchDistReader(folder).read_object(COMMON_KEY)
    except CheckpointError:
        raise
    except KeyError as error:
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
    """Copy the state without the `_extra_state` objects (TE's scales) that the checkpoint lacks."""
    kept, _ = extract_matching_values(
        sharded_state,
        lambda value: not isinstance(value, ShardedObject) or value.unique_key in index.state_dict_metadata,
    )
    return kept
