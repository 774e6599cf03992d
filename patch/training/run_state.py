"""The state of a run as one sharded state dict: weights, optimizer, random generators, progress.

Weights and optimizer states can be read at any layout. A random generator belongs to a rank, so another
layout seeds the generators anew. Learning rate and data order are functions of the iteration and of the
number of consumed samples, so only these two numbers are saved.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import megatron.core
import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from patch import __version__
from patch.checkpoint import (
    latest_iteration,
    load_checkpoint,
    load_only_weights,
    read_common,
    weights_folder,
)
from patch.checkpoint.folder import NoWholeCheckpointError
from patch.checkpoint.sharded_tensors import shards_of
from patch.config import to_yaml
from patch.config.schema import RANK_AXES
from patch.distributed.collectives import all_gather_object, all_or_none, from_rank_0
from patch.distributed.groups import seed_generators
from patch.errors import CheckpointError
from patch.logger import get_logger
from patch.model import WEIGHT_PREFIXES, LlamaModel, sharded_weights
from patch.model.nf4_product import independent_of_layout
from patch.model.te_scales import restore_scales
from patch.storage.names import iteration_name
from patch.storage.places import AnyPath, any_path

if TYPE_CHECKING:
    from patch.training.setup import Run

_logger = get_logger(__name__)

_VERSIONS = {
    "llama-megatron-patch": __version__,
    "megatron-core": megatron.core.__version__,
    "torch": str(torch.__version__),
}
"""Stored for people; the program never reads it."""
_WEIGHTS_ONLY = "weights_only"
"""Key of the common values; True in a checkpoint without optimizer states."""
_BASE = "base"
"""Key of the common values: the checksum of the base weights that the adapters belong to."""


class Progress(NamedTuple):
    """Progress of a run."""

    iteration: int
    """Finished optimizer steps."""
    consumed_samples: int
    """Samples of the finished steps."""


def find_progress(root: AnyPath) -> Progress | None:
    """Return the progress of the newest undamaged checkpoint, or None if there is no checkpoint. Collective.

    Raises:
        CheckpointError: see `patch.checkpoint.latest_iteration`; or another version saved the checkpoint.
    """
    iteration = latest_iteration(root)
    if iteration is None:
        return None
    common = from_rank_0(lambda: read_common(root, iteration))
    return Progress(iteration, _value(root, iteration, common, "consumed_samples"))


def find_newest(root: AnyPath, disk: Path) -> tuple[AnyPath, Progress | None]:
    """Find the newest undamaged checkpoint in `root` and, if `root` is in a store, in `disk`. Collective.

    Args:
        root: the folder of the run's checkpoints.
        disk: the folder of the checkpoints that were saved before --save was given.

    Returns:
        the folder with the checkpoint, and its progress; `root` and None if there is no checkpoint.

    Raises:
        CheckpointError: see `find_progress`.
    """
    found: dict[AnyPath, Progress] = {}
    damaged: list[CheckpointError] = []
    for place in dict.fromkeys((root, disk)):
        try:
            if (progress := find_progress(place)) is not None:
                found[place] = progress
        except NoWholeCheckpointError as error:
            damaged.append(error)
    if damaged and not found:
        raise damaged[0]
    for fault in damaged:
        _logger.warning("%s", fault)
    place = max(found, key=lambda place: found[place].iteration, default=root)  # the store wins a tie
    if place != root:
        _logger.warning(
            "RESUMING FROM THE DISK: the newest whole checkpoint is that of step %d in %s, not in %s, where "
            "the next ones are saved",
            found[place].iteration, place, root,
        )  # fmt: skip
    return place, found.get(place)


def _value(root: AnyPath, iteration: int, common: dict[str, Any], name: str) -> Any:
    if name not in common:
        raise CheckpointError(
            f"checkpoint {iteration} in {root} has no {name}: it was saved by another version of this "
            "program; start a new run from its weights (that folder as position 22)",
            field="output_path",
        )
    return common[name]


def state_to_save(
    run: Run, progress: Progress, *, weights_only: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the contents of a checkpoint: sections of shards (views of the state), and plain values.

    `weights_only` leaves out the optimizer and the random generators, which only a resume needs.
    """
    stages, optimizer = run.stages, run.optimizer
    common: dict[str, Any] = {**progress._asdict(), "versions": _VERSIONS, "config": to_yaml(run.config)}
    if stages[0].is_adapted:
        common[_BASE] = base_checksum(run)
    with optimizer.meta_weights():
        state = _sharded_state(run, weights_only=weights_only)
        for entry in nested_values(extract_sharded_tensors_and_factories(state["model"])[0]):
            entry.data = entry.data.detach()  # stays valid if the parameter's data is replaced
    if weights_only:
        return state, common | {_WEIGHTS_ONLY: True}
    state["random"] = _sharded_generators()
    return state, common | {"layout": _layout(stages), **optimizer.common_state_dict()}


def resume(run: Run, root: AnyPath, progress: Progress) -> None:
    """Load a checkpoint of any layout into a run. The caller loads the base of adapters first.

    At another layout, the run's seed and the iteration seed the random generators. If no steps are left to
    train, weights alone are enough.

    Args:
        root: the run's checkpoint folder.
        progress: the result of `find_progress`.
    Raises:
        CheckpointError: the checkpoint has only weights and steps may be left to train, or its adapters
            belong to another base.
    """
    stages, optimizer, training = run.stages, run.optimizer, run.config.training
    iteration, folder = progress.iteration, root / iteration_name(progress.iteration)
    common = from_rank_0(lambda: read_common(root, iteration))
    if stages[0].is_adapted:
        _check_base(folder, common.get(_BASE), base_checksum(run))
    weights_only = bool(common.get(_WEIGHTS_ONLY))
    if weights_only and iteration < training.train_iters:
        raise CheckpointError(
            f"{folder} is the end of a run with --save-weights-only-at-end: it has no optimizer states to "
            "train on with; start another folder from it (position 22), or remove it to resume from an older "
            "checkpoint",
            field="train_iters",
        )
    then, now = {} if weights_only else _value(root, iteration, common, "layout"), _layout(stages)
    with optimizer.meta_weights():
        state = _sharded_state(run, is_loading=True, weights_only=weights_only)
        if then == now:
            state["random"] = _sharded_generators()
        loaded = load_checkpoint(root, iteration, state)
        with all_or_none():
            restore_scales(stages, loaded.get("model", {}))  # a rank may have no adapters
    if weights_only:
        optimizer.reload_model_params()
        return
    optimizer.load_common_state_dict(loaded)
    if then == now:
        set_random_state({name: shard.data for name, shard in state["random"].items()})
        return
    seed_generators(int(np.random.SeedSequence((training.seed, iteration)).generate_state(1)[0]))
    _logger.info(
        "the checkpoint was saved at %s, this run has %s: random generators are seeded anew from seed %d and "
        "step %d",
        _text(then), _text(now), training.seed, iteration,
    )  # fmt: skip


def _check_base(folder: AnyPath, then: str | None, now: str) -> None:
    if then is None:
        what = f"{folder} has no adapters, expected those of base weights {now}; take another checkpoint"
        raise CheckpointError(what, field="load")
    if then != now:
        raise CheckpointError(
            f"the adapters in {folder} belong to base weights with checksum {then}, but this run loaded "
            f"{now}; pass the original base (--load, position 22) in the same precision",
            field="load",
        )


def load_weights(run: Run, load: str, *, adapters: bool = False) -> None:
    """Load only the weights of a checkpoint into a run.

    Args:
        load: a run's folder, a converted checkpoint, or a checkpoint of Megatron-LM; a path or a URL.
        adapters: load the weights of the adapters instead of the base.
    """
    with all_or_none():
        folder = any_path(load)
    with run.optimizer.meta_weights():
        state = {"model": run.optimizer.sharded_weights(sharded_weights(run.stages, adapters=adapters))}
        vocab_size = run.config.model.vocab_size
        load_only_weights(weights_folder(folder), state, prefixes=WEIGHT_PREFIXES, vocab_size=vocab_size)


def base_checksum(run: Run) -> str:
    """Return the checksum of the base weights. It is computed once, because these weights never change."""
    first = run.stages[0]
    if first.base is None:
        first.base = checksum(run, adapters=False)
    return first.base


def checksum(run: Run, *, adapters: bool | None = None) -> str:
    """Return a checksum of weights that is equal at every layout; a collective.

    The checksum weights each number's bits by the tensor's name, the layer and the row, so different weights
    have equal checksums only by chance. For `adapters`, see `sharded_weights`.
    """
    total = 0
    with run.optimizer.meta_weights() as visit:
        for shard in shards_of(sharded_weights(run.stages, adapters=adapters)):
            if not isinstance(shard, ShardedTensor):
                continue
            assert shard.data is not None, "a state dict to save holds its tensors"
            if visit is not None:
                shard.data = visit(shard.data)
            total += _sum_of(shard) if is_main_replica(shard.replica_id) else 0
    return f"{sum(all_gather_object(total)) % 2**64:016x}"


def _sum_of(shard: ShardedTensor) -> int:
    number, data = shard.prepend_axis_num, shard.data.detach().view(len(shard.data), -1)
    data = independent_of_layout(data)
    bits = data.view(torch.int32 if data.element_size() == 4 else torch.int16)
    first = shard.global_offset[number]
    rows = torch.arange(first + 1, first + 1 + len(bits), device=bits.device)
    factor = zlib.crc32(f"{shard.key} {shard.global_offset[:number]}".encode())
    return factor * int((bits.sum(1, dtype=torch.int64) * rows).sum())


def _sharded_state(run: Run, *, is_loading: bool = False, weights_only: bool) -> dict[str, Any]:
    """Return the sections of weights, of the adapters if there are any, and of optimizer states."""
    weights, state = sharded_weights(run.stages, adapters=run.stages[0].is_adapted or None), dict[str, Any]()
    if not weights_only:
        state["optimizer"] = run.optimizer.sharded_state_dict(weights, is_loading=is_loading)
    return {"model": run.optimizer.sharded_weights(weights), **state}


def _sharded_generators() -> dict[str, ShardedTensor]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return {
        name: ShardedTensor.from_rank_offsets(
            f"random.{name}", state, (0, rank, world_size), prepend_axis_num=1
        )
        for name, state in random_state().items()
    }


def _layout(stages: list[LlamaModel]) -> dict[str, int | str]:
    """Return the sizes that decide a rank's random generators; VPP does not, so it may change."""
    config = stages[0].config
    layout: dict[str, int | str] = {
        "TP": config.tensor_model_parallel_size,
        "PP": config.pipeline_model_parallel_size,
        "CP": config.context_parallel_size,
        "processes": dist.get_world_size(),
        "device": "cuda" if torch.cuda.is_available() else "cpu",
    }
    axes = [axis for axis in RANK_AXES if getattr(stages[0].pg_collection, axis).size() > 1]
    if (order := sorted(axes, key=lambda axis: _stride(stages[0].pg_collection, axis))) != axes:
        layout["order"] = "-".join(order)
    return layout


def _stride(groups: ProcessGroupCollection, axis: str) -> int:
    first, second, *_ = dist.get_process_group_ranks(getattr(groups, axis))
    return second - first


def _text(layout: dict[str, int | str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in layout.items())


def random_state() -> dict[str, torch.Tensor]:
    """Return this rank's random states: CPU, CUDA, and upstream's tracker of TP-dependent generators."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states | {f"tracker.{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}


@contextmanager
def unchanged_random_state() -> Iterator[None]:
    """Context or decorator: what follows draws the same numbers as without the work inside."""
    before = random_state()
    yield
    set_random_state(before)


def set_random_state(states: dict[str, torch.Tensor]) -> None:
    """Restore the states that `random_state` returned."""
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    tracked = {name.partition(".")[2]: state for name, state in states.items() if "." in name}
    get_cuda_rng_tracker().set_states(tracked)
