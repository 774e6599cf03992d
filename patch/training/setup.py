"""Build all parts of a run, in this order: data, model, optimizer, weights."""

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
from patch.convert.live_weights import ExpertRanks, mapped_parameters
from patch.convert.mappings import TPShard
from patch.data import BatchReader, load_tokenizer
from patch.data.order import StepReader
from patch.device import DeviceContext, usable_memory
from patch.distributed.async_collectives import WaitClock
from patch.distributed.collectives import all_or_none, from_rank_0
from patch.families.adapters import SECOND_FACTOR
from patch.features.optimizers import optimizer_of
from patch.logger import get_logger
from patch.memory.saved_tensors import SavedTensors
from patch.memory.simulated_device import SimulatedDevice
from patch.model import (
    LlamaModel,
    build_llama_model,
    forget_weights,
    forgetting_weights,
    initialize_weights,
    sharded_weights,
)
from patch.optimizer import OverlappedDistributedOptimizer, build_optimizer, default_param_groups
from patch.optimizer.param_groups import Matrix
from patch.preflight.checkpoint_places import checkpoint_root, disk_root
from patch.preflight.data_record import SetRecord
from patch.preflight.model_of_folder import is_hf_folder
from patch.storage.names import ADAPTER_CONFIG_NAME
from patch.storage.places import AnyPath
from patch.training import OBJECTIVES
from patch.training.guards.phases import PhaseClock
from patch.training.objectives.objective import Objective
from patch.training.run_state import Progress, find_newest, load_weights, resume
from patch.training.state_placement import log_placement

if TYPE_CHECKING:
    from patch.training.step_data import StepBatches

_logger = get_logger(__name__)


@dataclass
class RunData:
    """The data that one rank reads, and its objective."""

    objective: Objective
    train_reader: StepReader
    valid_readers: dict[str, BatchReader]
    """The reader of each validation set, by name."""
    valid_weights: list[float] | None = None
    """Weights of the validation sets, or None if VALID_DATASET_PATH has no weights."""
    sample_place: Callable[[int], str] | None = None
    """Function from a sample's number in the run to its place in the data, or None if that is not known."""
    records: list[SetRecord] = field(default_factory=list)
    """Records of the training sets (see `DataSets`)."""
    upcoming: StepBatches | None = None
    """The data of the next step, or None if it is not read yet."""
    clock: WaitClock = field(default_factory=lambda: WaitClock(torch.device("cpu")))
    """Measures the time that steps wait for their data."""


@dataclass
class Run:
    """One rank's parts of a run: model, optimizer, data and progress."""

    config: RunConfig
    """The configuration; a length in epochs is already converted to steps."""
    device: torch.device
    groups: ProcessGroupCollection
    stages: list[LlamaModel]
    """This rank's pipeline stages, in forward order."""
    optimizer: OverlappedDistributedOptimizer
    data: RunData
    start_iteration: int = 0
    """Optimizer steps of the resumed checkpoint, or 0."""
    samples_ahead: int = 0
    """Consumed samples minus global batch size * steps; not 0 if a resume changed the global batch size."""
    num_skips: int = 0
    """Number of consecutive steps, up to the last one, that were skipped because of non-finite gradients."""
    tokenizer: Any = None
    """The tokenizer to export with the model."""
    phases: PhaseClock = field(default_factory=PhaseClock)
    """The current phase of this rank."""

    @property
    def activation_offload(self) -> SavedTensors | None:
        """The activations offloaded to host memory until backward, or None without AC=offload."""
        return self.stages[0].activation_offload

    def consumed_samples(self, iteration: int) -> int:
        """Return the number of samples of the first `iteration` steps."""
        return iteration * self.config.training.global_batch_size + self.samples_ahead


def build_run(
    config: RunConfig, context: DeviceContext, groups: ProcessGroupCollection, phases: PhaseClock
) -> Run:
    """Build the run on this rank and load its weights or its checkpoint.

    Raises:
        ConfigError, DataError, CheckpointError, ConversionError: on all ranks or on none.
    """
    root, progress = find_newest(checkpoint_root(config), disk_root(config))
    training, (start, consumed) = config.training, progress or Progress(0, 0)
    ahead = consumed - start * training.global_batch_size
    with all_or_none():
        tokenizer = load_tokenizer(config.tokenizer_folder)
    objective = OBJECTIVES[config.training.objective](config)
    sets = objective.build_datasets(tokenizer, partial(num_train_samples, config, ahead=ahead))
    config = with_samples(config, sets.num_train_samples, ahead=ahead)
    stages, optimizer = build_model(config, groups, context.device)

    train_reader = objective.reader(sets.train, groups, shuffle=not sets.train.is_shuffled, ahead=ahead)
    valid_readers = {name: objective.reader(source, groups) for name, source in sets.valid.items()}
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
    """Build this rank's stages with uninitialized weights, and the optimizer whose buffer contains them."""
    is_sharded, least = config.gathers_weights_per_pass, config.optimizer.param_persistence_threshold
    with forgetting_weights(least) if is_sharded else nullcontext():  # one rank may lack memory for all
        stages = build_llama_model(config, groups, device)
    forget_weights(stages)  # otherwise the weights exist twice while the buffer is allocated
    optimizer = build_run_optimizer(stages, config, groups)
    if is_sharded:
        optimizer.materialize_frozen()
    return stages, optimizer


def build_run_optimizer(
    stages: list[LlamaModel], config: RunConfig, groups: ProcessGroupCollection
) -> OverlappedDistributedOptimizer:
    """Build the optimizer of a run and connect it to megatron-core's schedules.

    Raises:
        torch.OutOfMemoryError: --simulated-device-memory is too small for the buffers.
    """
    ratio = config.adapter.lora_plus_ratio
    rates = {} if ratio is None else {SECOND_FACTOR: ratio}
    needs_matrices = optimizer_of(config.optimizer).updates_whole_matrices
    optimizer = build_optimizer(
        stages,
        config.optimizer,
        config.zero_stage,
        groups,
        param_groups=default_param_groups(stages, config.optimizer, groups, rates=rates),
        host_bytes=usable_memory() // config.parallel.nproc_per_node,
        model_state=sharded_weights(stages) if config.optimizer.rounds_stochastically else None,
        matrices=_matrices(stages, config, groups) if needs_matrices else None,
    )
    optimizer.connect(stages[0].config)
    if (offload := stages[0].activation_offload) is None:
        _let_engine_add_gradients(stages)
    else:  # backward gets weights without attributes, so Transformer Engine's layers return gradients
        offload.clock = WaitClock(optimizer.device)
        if isinstance(optimizer.placement.device, SimulatedDevice):
            offload.device = optimizer.placement.device  # one device with one budget
    log_placement(optimizer)
    return optimizer


def _matrices(
    stages: list[LlamaModel], config: RunConfig, groups: ProcessGroupCollection
) -> dict[torch.nn.Parameter, Matrix]:
    """Return how Hugging Face's matrices make up each parameter of two dimensions."""
    experts, found = ExpertRanks.of(groups, config.model), {}
    adapter = config.adapter if config.adapter.is_on else None
    for each in mapped_parameters(stages, config.model, groups.tp.size(), experts, adapter):
        if isinstance(each.owner, torch.nn.Parameter) and each.owner.ndim == 2:
            group = groups.expt_tp if "#" in each.name else groups.tp
            shard = TPShard(group.rank(), group.size())
            found[each.owner] = Matrix(
                None if each.mapping.replicated or group.size() == 1 else group,
                each.mapping.megatron_to_hf,
                partial(each.mapping.hf_to_megatron, shard=shard),
            )
    return found


def _let_engine_add_gradients(stages: list[LlamaModel]) -> None:
    """Let Transformer Engine's layers accumulate gradients into the optimizer's main gradients."""
    # Upstream's configuration would do this too, but then upstream's own layers (the output layer) need APEX.
    # Source: megatron/core/tensor_parallel/layers.py.
    for module in chain.from_iterable(stage.modules() for stage in stages):
        weight = own_parameters(module).get("weight")  # may be sharded; its values are not read
        if hasattr(module, "fuse_wgrad_accumulation") and hasattr(weight, "get_main_grad"):
            module.fuse_wgrad_accumulation = True


def _load(run: Run, root: AnyPath, progress: Progress | None) -> None:
    """Resume the newest checkpoint in `root`; if there is none, start from --load or random weights."""
    # A checkpoint of adapters also needs the start weights; so may the objective of a resumed run.
    adapter, objective = run.config.adapter, run.data.objective
    is_begun = progress is not None and objective.goes_on(run)
    if not is_begun or adapter.is_on:
        load_start(run, is_begun=is_begun)
    if not is_begun:
        objective.prepare(run)
    if progress is not None:
        resume(run, root, progress)
        _log_resume(run, root, progress)
    if is_begun:
        objective.prepare(run)


def load_start(run: Run, *, is_begun: bool = False) -> None:
    """Load the start weights of a run; if it has already begun (`is_begun`), without --lora-load."""
    load, seed, adapter = run.config.checkpoint.load, run.config.training.seed, run.config.adapter
    optimizer, stages, model = run.optimizer, run.stages, run.config.model
    is_hf = load is not None and is_hf_folder(Path(load))
    with optimizer.meta_weights(to_write=True) as visit:
        initialize_weights(stages, model, seed, adapters=None if load is None else True, visit=visit)
        if load is not None and is_hf:
            import_hf(stages, Path(load), model, run.groups, visit=visit)
    if load is not None and not is_hf:
        load_weights(run, load)
    if (place := adapter.lora_load) and not is_begun:
        if from_rank_0((Path(place) / ADAPTER_CONFIG_NAME).is_file):
            with optimizer.full_weights(frozen=False):
                import_adapter(stages, place, model, adapter, run.groups)
        else:
            load_weights(run, place, adapters=True)
    optimizer.reload_model_params()
    _logger.info("weights from %s", f"seed {seed}" if load is None else load)


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
