"""A plan as lines with their formulas, and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from patch.config import RunConfig
from patch.config.choices import ZeroStage
from patch.config.fields import SECTIONS, scalar_of
from patch.device import MachineFacts
from patch.families import weight_rows
from patch.families.weights import TIED_OUTPUT
from patch.plan.activation_peak import heaviest_rank
from patch.plan.activations import activation_bytes
from patch.plan.cures import cures, what_lacks
from patch.plan.describe import describe_plan
from patch.plan.fits import fit_of
from patch.plan.flops import attended_pairs, flops_per_step
from patch.plan.memory import STATE_BYTES, bytes_per_rank, usable_device_memory
from patch.plan.parameters import element_bytes, layer_matrices, parameters_per_rank, total_parameters
from patch.plan.pipeline import Schedule
from patch.plan.planned_run import Planned
from patch.plan.search import Found
from patch.plan.timing.machine import Machine
from patch.plan.timing.machine_presets import machines_of
from patch.plan.timing.step_time import StepTime, step_time
from patch.storage.sizes import counted, scaled, size_text, timed

_SHOWN = 0.001
"""A part below 0.1 % of a step is not shown."""


def machine_line(machine: Machine) -> str:
    """A line about the planned machine."""
    device = size_text(machine.device_memory_bytes) if machine.is_gpu else f"{machine.host_cores} cores"
    number = f"{machine.devices_per_node} x {machine.name}" if machine.is_gpu else machine.name
    return (
        f"planned for {counted(machine.nodes, 'machine')} of {number} ({device}), host memory "
        f"{size_text(machine.host_memory_bytes)}"
    )


def time_lines(time: StepTime, config: RunConfig, machine: Machine) -> Iterator[str]:
    """Lines about a planned step.

    Args:
        time: its time.
        config: the run.
        machine: what it is planned for.
    """
    each, what = time.tokens_per_second / config.world_size, "GPU" if machine.is_gpu else "process"
    mfu = f", MFU {time.mfu:.1%}" if time.mfu is not None else ""
    yield (
        f"time        {timed(time.seconds)} a step: {_count(time.tokens_per_second)} tokens/s, "
        f"{_count(each)} a {what}, {scaled(time.model_flops)}FLOP/s a {what}{mfu} (planned, not measured)"
    )
    for part in time.parts:
        if part.seconds >= _SHOWN * time.seconds:
            share = f"{part.seconds / time.seconds:.1%}"
            yield f"{_INDENT}{share:>6}  {timed(part.seconds):>8}  {part.name}"


def budget_line(time: StepTime, machine: Machine, tokens: float) -> str:
    """A line about the days, device hours and price of a number of tokens.

    Args:
        time: of a step.
        machine: what it is planned for.
        tokens: to train on.
    """
    days, hours, price = budget(time, machine, tokens)
    cost = "" if price is None else f", price {price:,.0f}"
    return f"budget      {_count(tokens)} tokens take {days:.3g} days, {hours:,.0f} device hours{cost}"


def budget(time: StepTime, machine: Machine, tokens: float) -> tuple[float, float, float | None]:
    """Days, device hours, and their price if the machine has one.

    Args:
        time, machine, tokens: see `budget_line`.
    """
    hours = tokens / time.tokens_per_second / 3600
    devices = hours * machine.num_devices
    each = machine.price_per_device_hour
    return hours / 24, devices, None if each is None else devices * each


def _count(number: float) -> str:
    return scaled(number).rstrip()


def explanations(config: RunConfig, machine: Machine, time: StepTime) -> dict[str, list[str]]:
    """By the first word of a line of the plan: the formulas behind it.

    Args:
        config: the run, its automatic choices made.
        machine: what it is planned for.
        time: of a step.
    """
    return {
        "parameters": list(_parameters(config)),
        "state/rank": list(_state(config)),
        "activations": list(_activations(config, machine)),
        "memory/rank": list(_memory(config, machine)),
        "bubble": list(_bubble(config)),
        "step": list(_flops(config)),
        "time": [f"{part.name}: {part.formula}" for part in time.parts if part.seconds],
        "planned": list(_machine(machine)),
    }


def _parameters(config: RunConfig) -> Iterator[str]:
    model = config.model
    for row in weight_rows(model):
        if row.name == TIED_OUTPUT and not model.untie_embeddings_and_output_weights:
            continue
        times = f"{model.num_layers} layers x " if row.is_per_layer else ""
        shapes = " + ".join(" x ".join(map(str, shape)) for shape in row.hf.values())
        yield f"{row.name}: {times}({shapes})"


def _state(config: RunConfig) -> Iterator[str]:
    of_ranks = parameters_per_rank(config.model, config.parallel)
    shares, stage = config.num_state_shares, config.zero_stage
    state, precision = bytes_per_rank(config), config.training.precision
    yield (
        f"{max(of_ranks)} parameters on the heaviest rank: of its stage, matrices and vocabulary over TP "
        f"{config.parallel.tensor_model_parallel_size}"
    )
    yield f"weights: {max(of_ranks)} x {element_bytes(precision)} bytes = {size_text(state.weights)}"
    cut = f" / {shares}" if stage is ZeroStage.GRADIENTS else ""
    main = element_bytes(config.optimizer.main_grads_dtype)
    yield f"gradients: {max(of_ranks)} x {main} bytes{cut} = {size_text(state.gradients)}"
    cut = "" if stage is ZeroStage.NONE else f" / {shares}"
    yield (
        f"optimizer: {max(of_ranks)} x {STATE_BYTES[precision]} bytes{cut} (moments 8, and what a float32 "
        f"master has beyond the weight), less what is on the host = {size_text(state.optimizer)}"
    )


def _activations(config: RunConfig, machine: Machine) -> Iterator[str]:
    model, parallel, training = config.model, config.parallel, config.training
    kept = activation_bytes(model, parallel, training, length=config.sample_length, cuda=machine.is_gpu)
    tokens = config.micro_batch_tokens
    for setting, num_bytes in kept.items():
        yield f"{setting or 'none'}: {tokens} tokens x {num_bytes / tokens:.0f} bytes of a token"
    yield "none keeps norms' inputs and outputs, q, k, v, attention's result, gate, up and their product"
    yield "sel leaves out what the norms give and the product; full keeps the layer's input"


def _memory(config: RunConfig, machine: Machine) -> Iterator[str]:
    if config.model.precision_align is not None:
        return
    rank = heaviest_rank(config, cuda=machine.is_gpu)
    usable = usable_device_memory(config, machine.facts)
    kept = rank.activations
    yield (
        f"{rank.state} state + {rank.staging} of gradients under way + {rank.fp8_weights} 8-bit weights + "
        f"{kept.layers} of layers + {kept.ends} of ends + {kept.transient} of the running pass = "
        f"{rank.total} bytes"
    )
    yield (
        "the running pass: layers that are computed again, gradients of gate and up, a chunk of logits, "
        "messages; the worst moment of a step counts"
    )
    if machine.is_gpu:
        yield (
            f"may use {size_text(usable)} of {size_text(machine.device_memory_bytes)}: 5 % and 1 GiB are for "
            "CUDA, NCCL, cuDNN and fragmentation"
        )


def _bubble(config: RunConfig) -> Iterator[str]:
    schedule = Schedule.of(config)
    yield (
        f"(p - 1) / (v m) = ({schedule.pp_size} - 1) / ({schedule.vp_size} x {schedule.num_micro_batches}); "
        "unequal stages are simulated pass by pass"
    )


def _flops(config: RunConfig) -> Iterator[str]:
    model, length = config.model, config.sample_length
    tokens = config.training.global_batch_size * length
    pairs = attended_pairs([length], model.window_size)
    heads = model.num_attention_heads * model.kv_channels
    yield (
        f"3 x (2 x {tokens} tokens x ({model.num_layers} layers x {layer_matrices(model)} + output "
        f"{config.padded_vocab_size} x {model.hidden_size}) + {config.training.global_batch_size} x 4 x "
        f"{model.num_layers} x {heads} x {pairs} pairs) = {flops_per_step(config).model:.4g}"
    )
    yield "a multiply-add is 2 FLOPs, backward is twice forward, attention counts the pairs under its mask"


def _machine(machine: Machine) -> Iterator[str]:
    reached = machine.reached
    yield (
        f"of a device: {machine.bf16_flops / 1e12:g} TFLOP/s in bf16, {machine.fp8_flops / 1e12:g} in fp8, "
        f"{machine.device_bandwidth / 1e12:g} TB/s; GB/s each way: in a node "
        f"{machine.node_link_bandwidth / 1e9:g}, to others {machine.network_bandwidth / 1e9:g}, to the host "
        f"{machine.host_link_bandwidth / 1e9:g}"
    )
    yield (
        f"assumed shares: products {reached.gemm}, attention {reached.attention_forward} and "
        f"{reached.attention_backward}, memory {reached.device_bandwidth}, all three sustained "
        f"{reached.sustained}; links {reached.node_link}, {reached.network} and {reached.host_link}"
    )
    yield f"a collective's step takes {timed(machine.node_link_latency)}, or {timed(machine.network_latency)}"


_INDENT = " " * 12


def describe_here(config: RunConfig, facts: MachineFacts) -> list[str]:
    """The plan of a run on this machine, or on several like it: what `--dry-run` prints.

    A step's time is planned where the GPU's rates are known.

    Args:
        config: the run, its automatic choices made.
        facts: this machine.
    """
    lines = describe_plan(config, facts).splitlines()
    machine = machines_of(config, facts)
    if machine is None:  # a GPU that no preset is like
        return [f"planned for this machine and those like it: {facts.cuda_name}", *lines]
    note = "; for other machines: llama-patch plan --machine h100 --nodes 4 -- RUN"
    times = time_lines(step_time(config, machine), config, machine) if machine.is_gpu else ()
    return [machine_line(machine) + note, *lines, *times]


def plan_lines(planned: Planned, tokens: float | None, *, explain: bool) -> Iterator[str]:
    """The plan of a run.

    Args:
        planned: the run and its machine.
        tokens: of the whole training, for days and cost; None: none are said.
        explain: whether the formulas follow each line.
    """
    config, machine = planned.resolved, planned.machine
    time = step_time(config, machine)
    lines = [
        machine_line(machine),
        *describe_plan(config, machine.facts).splitlines(),
        *time_lines(time, config, machine),
        *([budget_line(time, machine, tokens)] if tokens else []),
        *_advice(planned),
    ]
    formulas = explanations(config, machine, time) if explain else {}
    label = ""
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        yield line
        label = line.split()[0] if not line.startswith(" ") else label
        if not following.startswith(" "):  # the lines of a label stay together
            yield from (f"{_INDENT}= {formula}" for formula in formulas.get(label, []))
    if explain:
        yield from (f"chosen      {note}" for note in planned.notes)


def _advice(planned: Planned) -> Iterator[str]:
    """Whether the run fits, and what would make it fit."""
    config, facts = planned.resolved, planned.machine.facts
    if fit_of(config, facts).is_whole:
        yield "fits        yes"
        return
    found = cures(config, facts, planned.machine)
    yield f"fits        no: {'it would with one of' if found else what_lacks(config, facts)}"
    yield from (f"{_INDENT}{cure}" for cure in found)


def plan_json(planned: Planned, tokens: float | None) -> dict[str, Any]:
    """The plan of a run for JSON: bytes, seconds, FLOP/s.

    Args:
        planned: the run and its machine.
        tokens: see `plan_lines`.
    """
    config, machine = planned.resolved, planned.machine
    time, fit = step_time(config, machine), fit_of(config, machine.facts)
    report = {
        "machine": machine.to_json(),
        "run": {
            section: {field.name: scalar_of(config, field.name) for field in dataclasses.fields(cls)}
            for section, cls in SECTIONS.items()
        },
        "parameters": total_parameters(config.model),
        "parameters_per_rank": parameters_per_rank(config.model, config.parallel),
        "state": [
            bytes_per_rank(config, rank)._asdict()
            for rank in range(config.parallel.pipeline_model_parallel_size)
        ],
        "memory": fit._asdict(),
        "fits": fit.is_whole,
        "time": _time_json(time),
    }
    if tokens:
        names = ("days", "device_hours", "price")
        report["budget"] = {"tokens": tokens, **dict(zip(names, budget(time, machine, tokens), strict=True))}
    return report


def _time_json(time: StepTime) -> dict[str, Any]:
    return {
        "step_seconds": time.seconds,
        "tokens_per_second": time.tokens_per_second,
        "model_flops_per_device": time.model_flops,
        "mfu": time.mfu,
        "parts": [part._asdict() for part in time.parts],
    }


def found_row(found: Found) -> dict[str, Any]:
    """A layout of a search: its sizes, savings, memory and speed.

    Args:
        found: the layout.
    """
    run, optimizer = found.resolved, found.resolved.optimizer
    return {
        **found.layout._asdict(),
        "dp": run.data_parallel_size,
        "sharding": run.zero_stage.name.lower(),
        "bucket_size": optimizer.reduce_bucket_size,
        "recompute": found.resolved.recompute or "none",
        "host_fraction": optimizer.optimizer_offload_fraction if optimizer.optimizer_offload_policy else 0.0,
        "device_bytes": found.fit.device_needed,
        "step_seconds": found.time.seconds,
        "tokens_per_second_per_device": found.time.tokens_per_second / run.world_size,
        "mfu": found.time.mfu,
    }
