"""The plan of the pipeline as text: its bubble, and the memory of its heaviest rank."""

from __future__ import annotations

from collections.abc import Iterator

from patch.config import RunConfig
from patch.device import MachineFacts
from patch.plan.activation_peak import heaviest_rank, host_memory_needed
from patch.plan.balance import better_split, stage_work, step_timing
from patch.plan.flops import output_in_layers
from patch.plan.memory import needed_bytes
from patch.plan.pipeline import Schedule
from patch.storage.sizes import counted, size_text

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
