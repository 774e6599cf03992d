"""Builds all parts of a run, in this order: data, model, optimizer, weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.checks.run_length import num_train_samples, with_samples
from patch.compat.torch_internals import own_parameters
from patch.config.schema import RunConfig
from patch.convert import import_hf
from patch.convert.live_adapters import import_adapter
from patch.data import BatchReader, load_tokenizer
from patch.data.order import StepReader
from patch.data.samples import SampleSource
from patch.device import DeviceContext, usable_memory
from patch.distributed.async_collectives import WaitClock
from patch.distributed.collectives import all_or_none, from_rank_0
from patch.distributed.context_group import Zigzag
from patch.logger import get_logger
from patch.memory import SavedTensors, SimulatedDevice
from patch.model import (
    LlamaModel,
    build_llama_model,
    forget_weights,
    forgetting_weights,
    initialize_weights,
    sharded_weights,
)
from patch.optimizer import OverlappedDistributedOptimizer, build_optimizer
from patch.preflight.checkpoint_places import checkpoint_root, disk_root
from patch.preflight.data_record import SetRecord
from patch.preflight.stored_shape import is_hf_folder
from patch.storage.names import ADAPTER_CONFIG_NAME
from patch.storage.places import AnyPath, any_path
from patch.training import OBJECTIVES
from patch.training.guards.phases import PhaseClock
from patch.training.objective import Objective
from patch.training.run_state import Progress, find_newest, load_weights, resume
from patch.training.state_placement import log_placement

if TYPE_CHECKING:
    from patch.training.step_data import StepWork

_logger = get_logger(__name__)


@dataclass
class RunData:
    """The data that one rank reads, and its objective."""

    objective: Objective
    train_reader: StepReader
    valid_readers: dict[str, BatchReader]
    """The reader of each validation set, by its name; empty if there is none."""
    valid_weights: list[float] | None = None
    """Weights of the validation sets, if position 21 has weights."""
    sample_place: Callable[[int], str] | None = None
    """Gives the place in the data of a sample, by its number in the run; None: not known."""
    records: list[SetRecord] = field(default_factory=list)
    """Records of the training sets of rows (see `DataSets`)."""
    upcoming: StepWork | None = None
    """The data of the next step, read while the last step ended; None: not read yet."""
    clock: WaitClock = field(default_factory=lambda: WaitClock(torch.device("cpu")))
    """Counts how long steps wait for their data."""


@dataclass
class Run:
    """One rank's parts of a run: the model with its optimizer, the data, and how far they are."""

    config: RunConfig
    """With the steps that the training set decided, if the length was given in epochs."""
    device: torch.device
    groups: ProcessGroupCollection
    stages: list[LlamaModel]
    """This rank's pipeline stages, in the order in which a batch passes them."""
    optimizer: OverlappedDistributedOptimizer
    data: RunData
    start_iteration: int = 0
    """Optimizer steps already done: 0, or those of the checkpoint that was resumed."""
    samples_ahead: int = 0
    """Samples consumed beyond one global batch a step; not 0 once the global batch size was changed."""
    num_skips: int = 0
    """Steps in a row, up to the last one, that were skipped because their gradients were not finite."""
    tokenizer: Any = None
    """Exported with the model."""
    phases: PhaseClock = field(default_factory=PhaseClock)
    """Notes of what this rank does now."""

    @property
    def activation_offload(self) -> SavedTensors | None:
        """The activations that are in host memory until backward, with AC=offload."""
        return self.stages[0].activation_offload

    def consumed_samples(self, iteration: int) -> int:
        """The samples of the first `iteration` steps."""
        return iteration * self.config.training.global_batch_size + self.samples_ahead


def build_run(
    config: RunConfig, context: DeviceContext, groups: ProcessGroupCollection, phases: PhaseClock
) -> Run:
    """Build the run on this rank and load its weights or its checkpoint.

    Args:
        config: the run.
        context: the device of this rank.
        groups: the process groups of this rank.
        phases: gets the notes of what this rank does.
    Raises:
        ConfigError, DataError, CheckpointError, ConversionError: on all ranks or on none.
    """
    root, progress = find_newest(checkpoint_root(config), disk_root(config))
    training, (start, consumed) = config.training, progress or Progress(0, 0)
    ahead = consumed - start * training.global_batch_size
    with all_or_none():
        tokenizer = load_tokenizer(config.tokenizer_folder)
    objective = (OBJECTIVES[config.training.objective] or Objective)(config)
    sets = objective.build_datasets(tokenizer, partial(num_train_samples, config, ahead=ahead))
    config = with_samples(config, sets.num_train_samples, ahead=ahead)
    stages, optimizer = build_model(config, groups, context.device)

    def reader(source: SampleSource, *, shuffle: bool, ahead: int = 0) -> BatchReader:
        return BatchReader(
            source, micro_batch_size=training.micro_batch_size, global_batch_size=training.global_batch_size,
            dp_rank=groups.dp.rank(), dp_size=groups.dp.size(), seed=training.seed, shuffle=shuffle,
            zigzag=Zigzag.of(groups.cp), ahead=ahead, make_batch=objective.collate,
        )  # fmt: skip

    train_reader = reader(sets.train, shuffle=not sets.train.is_shuffled, ahead=ahead)
    valid_readers = {name: reader(source, shuffle=False) for name, source in sets.valid.items()}
    data = RunData(
        objective, train_reader, valid_readers, sets.valid_weights, train_reader.place, sets.records
    )
    run = Run(
        config, context.device, groups, stages, optimizer, data, start, ahead, tokenizer=tokenizer,
        phases=phases,
    )  # fmt: skip
    phases.num_before = start
    _load(run, root, progress)
    return run


def build_model(
    config: RunConfig, groups: ProcessGroupCollection, device: torch.device
) -> tuple[list[LlamaModel], OverlappedDistributedOptimizer]:
    """The stages of this rank with uninitialized weights, and their optimizer, whose buffer contains them.

    Args:
        config: the run.
        groups: the process groups of this rank.
        device: the device of this rank.
    """
    is_sharded, least = config.frees_weights, config.optimizer.param_persistence_threshold
    with forgetting_weights(least) if is_sharded else nullcontext():  # a rank may have no memory for all
        stages = build_llama_model(config.model, groups, device, config.execution)
    forget_weights(stages)  # otherwise they exist twice while the buffer is allocated
    optimizer = build_run_optimizer(stages, config, groups)
    if is_sharded:
        optimizer.give_frozen_memory()
    return stages, optimizer


def build_run_optimizer(
    stages: list[LlamaModel], config: RunConfig, groups: ProcessGroupCollection
) -> OverlappedDistributedOptimizer:
    """The optimizer of a run, connected to megatron-core's schedules.

    Args:
        stages: this rank's pipeline stages.
        config: the run.
        groups: the process groups of this rank.
    Raises:
        torch.OutOfMemoryError: --simulated-device-memory is too small for the buffers.
    """
    optimizer = build_optimizer(
        stages,
        config.optimizer,
        config.zero_stage,
        groups,
        host_bytes=usable_memory() // config.parallel.nproc_per_node,
        model_state=sharded_weights(stages) if config.optimizer.is_drawing else None,
    )
    optimizer.connect(stages[0].config)
    if (offload := stages[0].activation_offload) is None:
        _let_engine_add_gradients(stages)
    else:  # backward gets weights without their attributes: the engine's layers return their gradients
        offload.clock = WaitClock(optimizer.device)
        if isinstance(optimizer.placement.device, SimulatedDevice):
            offload.device = optimizer.placement.device  # one device with one budget
    log_placement(optimizer)
    return optimizer


def _let_engine_add_gradients(stages: list[LlamaModel]) -> None:
    """Tell Transformer Engine's layers to add their gradients where the optimizer's weights say.

    Not by upstream's configuration: with it upstream's own layers, of which the output layer is one, ask for
    APEX (megatron/core/tensor_parallel/layers.py).
    """
    for module in chain.from_iterable(stage.modules() for stage in stages):
        weight = own_parameters(module).get("weight")  # which may be in shards: it is not read
        if hasattr(module, "fuse_wgrad_accumulation") and hasattr(weight, "get_main_grad"):
            module.fuse_wgrad_accumulation = True


def _load(run: Run, root: AnyPath, progress: Progress | None) -> None:
    """Resume the newest checkpoint, which is in `root`; without one, start from --load or random weights.

    A checkpoint of adapters needs these weights too, as an objective of a resumed run may.
    """
    adapter, objective = run.config.adapter, run.data.objective
    is_begun = progress is not None and objective.goes_on(run)
    if not is_begun or adapter.lora_rank:
        load_start(run, is_begun=is_begun)
    if not is_begun:
        objective.prepare(run)
    if progress is not None:
        training = run.config.training
        resume(root, progress, run.stages, run.optimizer, training.seed, training.train_iters)
        _log_resume(run, root, progress)
    if is_begun:
        objective.prepare(run)


def load_start(run: Run, *, is_begun: bool = False) -> None:
    """The weights with which the run begins; of one that is begun without the adapters at --lora-load."""
    load, seed, adapter = run.config.checkpoint.load, run.config.training.seed, run.config.adapter
    optimizer, stages, model = run.optimizer, run.stages, run.config.model
    with optimizer.described_weights(to_write=True) as visit:
        initialize_weights(stages, model, seed, adapters=None if load is None else True, visit=visit)
        if load is not None and is_hf_folder(Path(load)):
            import_hf(stages, Path(load), model, run.groups, visit=visit)
    if load is None:
        load = f"seed {seed}"
    elif not is_hf_folder(Path(load)):
        with all_or_none():
            folder = any_path(load)
        with optimizer.described_weights():
            load_weights(folder, stages, run.config, optimizer)
    if adapter.lora_load and not is_begun:
        place = adapter.lora_load
        if from_rank_0(lambda: (Path(place) / ADAPTER_CONFIG_NAME).is_file()):
            with optimizer.full_weights(frozen=False):
                import_adapter(stages, adapter.lora_load, model, adapter, run.groups)
        else:
            with all_or_none():
                folder = any_path(place)
            with optimizer.described_weights():
                load_weights(folder, stages, run.config, optimizer, adapters=True)
    run.optimizer.reload_model_params()
    _logger.info("weights from %s", load)


def _log_resume(run: Run, root: AnyPath, progress: Progress) -> None:
    training = run.config.training
    done = progress.iteration
    _logger.info("resumed after step %d from %s", done, root)
    if done >= training.train_iters:
        _logger.info(
            "nothing is left to train of %d steps, %d are done; config.yaml stays", training.train_iters, done
        )
    elif run.samples_ahead or run.config.checkpoint.resume_with_changed_data:
        _logger.warning(
            "%d samples were consumed; training goes on with sample %d in the order that data, seed and "
            "batch size of this command give, and ends after step %d with %d samples",
            progress.consumed_samples, progress.consumed_samples, training.train_iters,
            run.consumed_samples(training.train_iters),
        )  # fmt: skip
