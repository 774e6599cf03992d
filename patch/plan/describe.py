"""The plan as text: what `--dry-run` prints besides the YAML."""

from __future__ import annotations

from collections.abc import Iterator

from patch.checks.run_length import is_counted_in_samples, num_train_samples, with_samples
from patch.config import RunConfig
from patch.config.backends import backends_of
from patch.config.choices import Recompute, ZeroStage
from patch.device import MachineFacts
from patch.plan.activation_peak import heaviest_rank, host_memory_needed
from patch.plan.activations import activation_bytes
from patch.plan.balance import better_split, stage_work, step_timing
from patch.plan.flops import flops_per_step, output_in_layers
from patch.plan.memory import bytes_per_rank, device_memory, needed_bytes, offloaded_bytes
from patch.plan.parameters import total_parameters
from patch.plan.pipeline import Schedule
from patch.plan.savings import Mix
from patch.preflight.checkpoint_places import newest_saved
from patch.storage.sizes import counted, scaled, size_text

_INDENT = " " * 12
_ROUNDED = 0.0005
"""A difference that one digit of a percentage does not show."""


def bubble_lines(config: RunConfig, machine: MachineFacts) -> Iterator[str]:
    """Idle time of the pipeline by its schedule, and the stage that is to blame; nothing without stages."""
    schedule = Schedule.of(config)
    if schedule.pp_size == 1:
        return
    has_several = schedule.vp_size > 1
    stages, count = (f"VPP {schedule.vp_size} x ", "({})") if has_several else ("", "{}")
    equal = f"(PP - 1) / {count.format(f'{stages}{schedule.num_micro_batches} micro-batches')}"
    timing = step_timing(config)
    if timing.bubble <= 1.01 * schedule.formula + _ROUNDED:
        yield f"bubble      {timing.bubble:.1%} of the computing time = {equal}"
        return
    yield (
        f"bubble      {timing.bubble:.1%} of the computing time; if all stages took equally long, "
        f"{equal} = {schedule.formula:.1%}"
    )
    work = stage_work(config).layers
    heaviest = max(range(len(work)), key=lambda stage: work[stage])
    yield (
        f"{_INDENT}stage {heaviest + 1} of {len(work)} is the heaviest: the work of {work[heaviest]:.1f} "
        f"layers, {sum(work) / len(work):.1f} on average (output layer and loss: "
        f"{output_in_layers(config):.1f})"
    )
    if split := better_split(config, machine):
        saved = 1 - split.timing.step / timing.step
        line = f"{_INDENT}{split.flags} would idle {split.timing.bubble:.1%} and take {saved:.1%} less time"
        if config.model.precision_align is None:
            needed = heaviest_rank(split.run, cuda=bool(machine.cuda_devices)).total
            line += f", with {size_text(needed)} a rank"
        yield line


def memory_lines(config: RunConfig, machine: MachineFacts) -> Iterator[str]:
    """Memory of the heaviest rank; none for `--precision-align`, which keeps more."""
    if config.model.precision_align is not None:
        return
    rank = heaviest_rank(config, cuda=bool(machine.cuda_devices))
    kept = rank.activations
    pp_size = config.parallel.pipeline_model_parallel_size
    where = f" on pipeline rank {rank.pp_rank} of {pp_size}" if pp_size > 1 else ""
    in_flight = counted(kept.in_flight, "micro-batch") + " in flight"
    if config.virtual_pipeline_size > 1:
        in_flight = f"{in_flight} through {config.virtual_pipeline_size} stages"
    staging = f"+ gradients under way {size_text(rank.staging)} " if rank.staging else ""
    fp8 = f"+ 8-bit weights {size_text(rank.fp8_weights)} " if rank.fp8_weights else ""
    on_host = f"; {size_text(kept.on_host)} more in host memory" if kept.on_host else ""
    yield (
        f"memory/rank {size_text(rank.total)} at most{where} = state {size_text(rank.state)} {staging}{fp8}"
        f"+ activations {size_text(kept.total)} ({in_flight}: layers {size_text(kept.layers)}, "
        f"loss, borders and RoPE {size_text(kept.ends)}, "
        f"the running pass {size_text(kept.transient)}{on_host})"
    )


def memory_needed(config: RunConfig, machine: MachineFacts) -> tuple[int, int, str]:
    """Bytes on the device of one process, and in the host memory of one machine; and what they consist of."""
    if config.model.precision_align is not None:
        return *needed_bytes(config, machine), "model state"
    rank = heaviest_rank(config, cuda=bool(machine.cuda_devices))
    return rank.total, host_memory_needed(config, machine, rank), "model state and activations"


def describe_plan(config: RunConfig, machine: MachineFacts) -> str:
    """Lines about processes, parameters, bytes of model state per rank, a step, the whole run; and warnings.

    Args:
        config: the run.
        machine: the machine whose memory is compared with what the run needs; all are taken to be equal.
    """
    training = config.training
    state = bytes_per_rank(config)
    host = offloaded_bytes(config)
    offloaded = f" ({size_text(host)} more in host memory)" if host else ""
    tokens = training.global_batch_size * config.sample_length
    return "\n".join(
        (
            f"processes   {layout_text(config)}",
            *_split_layers(config),
            f"parameters  {scaled(total_parameters(config.model))} ({config.model.model_size})",
            f"state/rank  {size_text(state.total)} = weights {size_text(state.weights)} "
            f"+ gradients {size_text(state.gradients)} + optimizer {size_text(state.optimizer)}{offloaded} "
            f"(data-parallel sharding: {config.zero_stage.name.lower()}{_instances(config)})",
            *_activations(config, machine),
            *memory_lines(config, machine),
            *bubble_lines(config, machine),
            f"step        {training.global_batch_size} samples x {config.sample_length} tokens = "
            f"{tokens} tokens, {counted(config.num_micro_batches, 'micro-batch')} a replica, "
            + _flops(config),
            *_packing(config),
            *_kernels(config, machine),
            f"run         {_length(config)}",
            *_resume(config),
            *_shortages(config, machine),
        )
    )


def layout_text(config: RunConfig) -> str:
    """Processes, their axes and machines: "8 = TP 2 x PP 1 x CP 1 x DP 4 on 1 machine"."""
    parallel, stages = config.parallel, config.virtual_pipeline_size
    return (
        f"{config.world_size} = TP {parallel.tensor_model_parallel_size} "
        f"x PP {parallel.pipeline_model_parallel_size} x CP {parallel.context_parallel_size} "
        f"x DP {config.data_parallel_size} on {counted(parallel.nnodes, 'machine')}"
        + (f", {stages} interleaved stages each" if stages > 1 else "")
    )


def _instances(config: RunConfig) -> str:
    """In how many groups of replicas, if in several."""
    number = config.parallel.num_distributed_optimizer_instances
    return f" in {number} instances" if number > 1 else ""


def _flops(config: RunConfig) -> str:
    """FLOPs of a step, and those with what recomputation repeats if they are more."""
    model, hardware = flops_per_step(config)
    repeated = f", {scaled(hardware)}FLOP with recomputation" if hardware > model else ""
    return f"{scaled(model)}FLOP{repeated}"


def _length(config: RunConfig) -> str:
    training = config.training
    if training.train_epochs is not None:
        return f"{_epochs(f'{training.train_epochs:g}')}; the steps follow from the training set"
    tokens = training.train_iters * training.global_batch_size * config.sample_length
    return f"{training.train_iters} steps = {scaled(tokens)} tokens"


def _resume(config: RunConfig) -> list[str]:
    """A line about the checkpoint that the run goes on from, by its name: whether it is whole is not read."""
    found = newest_saved(config)
    if found is None:
        return []
    root, newest = found
    of_all = "" if is_counted_in_samples(config) else f" of {config.training.train_iters}"
    return [f"resume      after step {newest}{of_all}, from {root}"]


def describe_length(config: RunConfig, one_pass: int) -> str:
    """A line about the steps and epochs of the run.

    Args:
        config: the run.
        one_pass: samples of one pass over its training sets.

    Raises:
        ConfigError: its epochs have fewer steps than its warm-up.
    """
    taken = num_train_samples(config, one_pass)
    steps = with_samples(config, taken).training.train_iters
    epochs = _epochs(f"{taken / one_pass:.3g}")
    return f"length      {counted(steps, 'step')} = {epochs} of {counted(one_pass, 'sample')}"


def _epochs(number: str) -> str:
    return f"{number} epoch" if number == "1" else f"{number} epochs"


def _packing(config: RunConfig) -> list[str]:
    """A line about packed sequences; none for .bin/.idx, which are packed, or not, as they were made."""
    if not config.data.packing or config.data.dataset_type != "raw":
        return []
    return [
        f"packing     on: several rows share a sequence of {config.sample_length} tokens, a sample of the "
        "step is such a sequence"
    ]


def _kernels(config: RunConfig, machine: MachineFacts) -> list[str]:
    """A line about what serves each operation on a GPU."""
    return [f"kernels     {backends_of(config, machine).line}"] if machine.cuda_devices else []


def _split_layers(config: RunConfig) -> list[str]:
    """A line about the pipeline stages, if they have different numbers of layers."""
    layers = config.stage_layers
    if len(set(layers)) == 1:
        return []
    split = " + ".join(map(str, layers))
    return [f"layers      {config.model.num_layers} = {split} over the pipeline stages"]


def _activations(config: RunConfig, machine: MachineFacts) -> list[str]:
    """A line about what layers keep, and the run's mix; none for `--precision-align`, which keeps more."""
    if config.model.precision_align is not None:
        return []
    words: dict[Recompute | None, str] = {None: "none", "selective": "sel", "full": "full"}
    kept = activation_bytes(
        config.model,
        config.parallel,
        config.training,
        length=config.sample_length,
        cuda=bool(machine.cuda_devices),
    )
    sizes = ", ".join(f"{words[setting]} {size_text(num_bytes)}" for setting, num_bytes in kept.items())
    return [
        f"activations a layer and micro-batch keep {sizes} for backward; "
        f"this run: {Mix.of(config).words} (AC)"
    ]


def _shortages(config: RunConfig, machine: MachineFacts) -> Iterator[str]:
    """A line for each memory that is too small."""
    on_device, on_host, what = memory_needed(config, machine)
    device = device_memory(config, machine)
    if 0 < device < on_device:
        name = "GPU" if machine.cuda_devices else "simulated device"
        yield (f"warning     {size_text(on_device)} of {what} on a {name} that has {size_text(device)}")
    if 0 < machine.host_memory_bytes < on_host:
        processes = counted(config.parallel.nproc_per_node, "process")
        of_host = "model state" if machine.cuda_devices else what
        yield (
            f"warning     {size_text(on_host)} of {of_host} in the host memory of {processes}, "
            f"a machine has {size_text(machine.host_memory_bytes)}"
        )


_SHARED = {
    ZeroStage.NONE: "nothing",
    ZeroStage.OPTIMIZER: "optimizer states",
    ZeroStage.GRADIENTS: "optimizer states and gradients",
}
_KINDS = {"optimizer": "optimizer states"}


def start_lines(config: RunConfig, *, cuda: bool) -> tuple[str, str]:
    """The layout and a step's micro-batches; the planned memory of the heaviest rank by kind.

    Args:
        config: the run, its automatic choices made.
        cuda: whether it runs on GPUs.
    """
    size = config.training.micro_batch_size
    return (
        f"layout: processes {layout_text(config)}; replicas share {_SHARED[config.zero_stage]}; a step has "
        f"{counted(config.num_micro_batches, 'micro-batch')} of {counted(size, 'sample')} a replica",
        _memory(config, cuda=cuda),
    )


def _memory(config: RunConfig, *, cuda: bool) -> str:
    if config.model.precision_align is not None:
        text = _sum(bytes_per_rank(config)._asdict())
        return f"planned state of a rank: {text}; --precision-align's activations are not planned"
    rank = heaviest_rank(config, cuda=cuda)
    kinds = bytes_per_rank(config, rank.pp_rank)._asdict()
    if is_auto := config.optimizer.optimizer_offload_policy == "auto":
        states = kinds.pop("optimizer")
    kinds |= {
        "gradients under way": rank.staging,
        "8-bit weights": rank.fp8_weights,
        "activations": rank.activations.total,
    }
    text = f"planned memory of the heaviest rank: {_sum(kinds)}"
    if is_auto:
        text += f"; {size_text(states)} of optimizer states beside it as far as there is room"
    on_host = offloaded_bytes(config, rank.pp_rank) + rank.activations.on_host
    return text + (f"; {size_text(on_host)} more in host memory" if on_host else "")


def _sum(kinds: dict[str, int]) -> str:
    parts = " + ".join(f"{_KINDS.get(kind, kind)} {size_text(size)}" for kind, size in kinds.items() if size)
    return f"{size_text(sum(kinds.values()))} = {parts}"
