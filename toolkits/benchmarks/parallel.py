"""Measures a pipeline's bubble, whether the ring's messages are hidden, and what offloaded activations cost.

    python -m toolkits.benchmarks.parallel [--part pipeline|context|activations] [--quick] [--json FILE]

The pipeline's layers wait instead of computing, so that any number of processes run on any number of cores.
The two context-parallel ranks are at the ends of cables of limited speed (needs root and iproute2).
Activations are offloaded from a simulated device, over copies of limited speed.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.config.schema import RunConfig
from patch.data.samples import cut_batch
from patch.device import DeviceContext, same_device
from patch.distributed.context_group import ContextGroup, Zigzag
from patch.distributed.groups import initialize
from patch.memory import SimulatedDevice
from patch.memory.offload_device import Copies, Event
from patch.model import LearnedTokens, LlamaModel, build_llama_model, initialize_weights
from patch.training.step import run_schedule
from toolkits.benchmarks._contenders import OurTrainer, SameBatches, run_config
from toolkits.benchmarks._measure import (
    COMMUNICATION,
    COMPUTE,
    Columns,
    Rounds,
    over_ranks,
    take_turns,
    time_on_ranks,
)
from toolkits.benchmarks._report import Aim, NotRunError, Panel, Report, run_benchmark, table
from toolkits.benchmarks._rig import DEVICE, Cables, WaitingLayer, compare, way_of
from toolkits.benchmarks._runner import CPU, job, run_ranks

PIPELINE, CONTEXT, ACTIVATIONS = PARTS = "pipeline", "context", "activations"
_ROUNDS = {PIPELINE: (5, 1), CONTEXT: (7, 2), ACTIVATIONS: (9, 1)}
"""Without and with --quick."""
_TIMEOUT_S = 900

_MICRO_BATCHES: dict[int, tuple[int, ...]] = {2: (2, 4, 8), 4: (4, 8, 16)}
"""Stages p -> numbers m of micro-batches; v is 1 and 2."""
_QUICK_MICRO_BATCHES: dict[int, tuple[int, ...]] = {2: (4,)}
_WAITS_S = (0.1, 0.4)
_MOST_OFF, _MOST_OVER_BOUND = 0.05, 1.1
_PROCESS_LAYERS = 2
"""Layers of a process: one stage of two layers, or two stages of one."""

WHOLE, RING, ALL_TO_ALL = "CP=1", "ring", "all-to-all"
WAITING_RING = "ring, no overlap"
_NUM_RANKS = 2
_SHARES, _QUICK_SHARES = (1.0, 0.4), (1.0,)
"""Speeds of the cables: time of the ring's messages alone as a share of its compute alone."""
_TOKENS = 8192
"""So many that attention is most of the compute, as in a large model with a long context."""

KEEP, RECOMPUTE = "keep all", "recompute all layers"
_COPY_SHARES = (0.5, 1.0, 2.0)
"""Speeds: the time of a layer's copy, as a share of the layer's forward."""
_LAYERS, _LENGTH = 8, 1024
_FORWARD_SHARE = 1 / 3
"""Share of the forward in forward and backward."""
_PLENTY = 10**15
"""Bytes of the device: a budget that counts, and never runs out."""


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report."""
    part = {"nargs": "+", "choices": PARTS, "default": PARTS, "help": "what to measure (default: all)"}
    return run_benchmark(
        _run, argv, quick="fewer cases and rounds: about a minute", options={"--part": part}
    )


def _run(arguments: argparse.Namespace) -> Report:
    parts = {PIPELINE: _pipeline, CONTEXT: _context, ACTIVATIONS: _activations}
    reports = {
        name: part(arguments.quick, _ROUNDS[name][arguments.quick])
        for name, part in parts.items()
        if name in arguments.part
    }
    return Report(
        "\n".join(one.text for one in reports.values()),
        [aim for one in reports.values() for aim in one.aims],
        [panel for one in reports.values() for panel in one.panels],
        {name: one.content for name, one in reports.items()},
    )


class Bubble(NamedTuple):
    """The steps of one pipeline: its bubble is what a step takes beyond its compute, as a share of it."""

    stages: int
    """p, processes."""
    virtual: int
    """v, stages of a process."""
    micro_batches: int
    """m."""
    rounds: dict[float, list[tuple[float, float]]]
    """Seconds of a micro-batch in the layers of a process -> see `time_schedule`, in each round."""

    @property
    def formula(self) -> float:
        """(p - 1) / (v m)."""
        return (self.stages - 1) / (self.virtual * self.micro_batches)

    def at(self, wait_s: float) -> float:
        """The bubble, with the costs of messages, of the schedule, of embedding and loss."""
        return median(step / layers for step, layers in self.rounds[wait_s]) - 1

    @property
    def without_constant(self) -> float:
        """The bubble without what a step costs however short its layers are: from two lengths of waiting."""
        ends = (self.rounds[wait_s] for wait_s in (min(self.rounds), max(self.rounds)))
        short, long = ([median(column) for column in zip(*rounds, strict=True)] for rounds in ends)
        return (long[0] - short[0]) / (long[1] - short[1]) - 1


def _pipeline(is_quick: bool, rounds: int) -> Report:
    bubbles = []
    for stages, micro_batches in (_QUICK_MICRO_BATCHES if is_quick else _MICRO_BATCHES).items():
        cases = [(v, m) for v in (1, 2) for m in micro_batches]
        measured = run_ranks(measure_bubbles, stages, _TIMEOUT_S, cases=cases, rounds=rounds)
        bubbles += [
            Bubble(stages, v, m, dict(zip(_WAITS_S, steps, strict=True)))
            for (v, m), steps in zip(cases, measured, strict=True)
        ]
    longest = max(_WAITS_S)
    aims = [
        Aim(
            "pipeline: farthest bubble from the formula, as a share of the formula, without constant costs",
            max(abs(one.without_constant / one.formula - 1) for one in bubbles), _MOST_OFF,
        ),
        Aim(
            f"pipeline: farthest step from the formula's, as a share of it, at {longest * 1e3:.0f} ms",
            max(abs((1 + one.at(longest)) / (1 + one.formula) - 1) for one in bubbles), _MOST_OFF,
        ),
    ]  # fmt: skip
    formulas = sorted(one.formula for one in bubbles)
    curves: dict[str, Any] = {"formula": (formulas, formulas)}
    for virtual in (1, 2):
        own = sorted((one.formula, one.at(longest)) for one in bubbles if one.virtual == virtual)
        curves[f"v = {virtual}"] = tuple(zip(*own, strict=True))
    panel = Panel("(p - 1) / (v m)", curves=curves, ylabel="bubble / compute")
    return Report(bubble_table(bubbles), aims, [panel], {"bubbles": [one._asdict() for one in bubbles]})


def bubble_table(bubbles: Sequence[Bubble]) -> str:
    """A row for each pipeline."""
    waits = sorted(bubbles[0].rounds)
    heads = ["p", "v", "m", "formula"]
    for head in (*(f"{wait_s * 1e3:.0f} ms" for wait_s in waits), "no constant"):
        heads += [head, "/ formula"]
    rows = []
    for one in bubbles:
        found = [*(one.at(wait_s) for wait_s in waits), one.without_constant]
        cells = [f"{value:.3f}" for measured in found for value in (measured, measured / one.formula)]
        rows.append([one.stages, one.virtual, one.micro_batches, f"{one.formula:.4f}", *cells])
    return table(heads, rows)


def pipeline_run(stages: int, virtual: int, micro_batches: int) -> RunConfig:
    """A model so small that all but the waiting takes next to no time."""
    return run_config(
        8, num_layers=_PROCESS_LAYERS * stages, hidden_size=8, ffn_hidden_size=8, num_attention_heads=1,
        num_query_groups=1, kv_channels=8, vocab_size=16, global_batch_size=micro_batches,
        nproc_per_node=stages, pipeline_model_parallel_size=stages,
        num_layers_per_virtual_pipeline_stage=_PROCESS_LAYERS // virtual if virtual > 1 else None,
    )  # fmt: skip


def time_schedule(
    config: RunConfig, groups: ProcessGroupCollection, wait_s: float
) -> Callable[[], tuple[float, float]]:
    """What gives the seconds of a step's forward and backward on the slowest process, and of its layers.

    Args:
        config: see `pipeline_run`.
        groups: the process groups of the job.
        wait_s: seconds of a micro-batch in the layers of a process, forward and backward.
    """
    def change(stage: LlamaModel) -> None:
        for index in range(len(stage.decoder.layers)):
            stage.decoder.layers[index] = WaitingLayer(wait_s / _PROCESS_LAYERS)

    run = OurTrainer(config, groups, CPU.device, change=change).run

    def step() -> None:
        run.optimizer.zero_grad(0.0)
        run_schedule(run, run.data.train_reader.step(0), divisor=1.0, loss_scale=1.0)

    def timed() -> tuple[float, float]:
        DEVICE.worked_s = 0.0
        seconds = time_on_ranks(step, CPU)
        worked_s = over_ranks(DEVICE.worked_s, CPU.device, dist.ReduceOp.SUM)
        return seconds, worked_s / dist.get_world_size()

    return timed


def measure_bubbles(
    context: DeviceContext, cases: Sequence[tuple[int, int]], rounds: int
) -> list[list[list[tuple[float, float]]]]:
    """What `time_schedule` found, by case, by length of waiting, by round.

    Args:
        context: the device.
        cases: v, stages of a process; m, micro-batches.
        rounds: how often each takes a step.
    """
    stages = dist.get_world_size()
    groups = initialize(pipeline_run(stages, 1, stages), context)
    steps = [
        [time_schedule(pipeline_run(stages, *case), groups, wait_s) for wait_s in _WAITS_S] for case in cases
    ]
    found = [[[step() for step in of_case] for of_case in steps] for _ in range(rounds)]
    return [[list(wait) for wait in zip(*case, strict=True)] for case in zip(*found, strict=True)]


def _context(is_quick: bool, rounds: int) -> Report:
    try:
        with Cables(_NUM_RANKS) as cables:
            measured = run_ranks(
                measure_ring, _NUM_RANKS, _TIMEOUT_S, cables=cables, rounds=rounds,
                shares=_QUICK_SHARES if is_quick else _SHARES,
            )  # fmt: skip
    except NotRunError as reason:
        return Report(f"context: not run: {reason}\n", [], [], {})
    aims, texts, panels = [], [], []
    for share, one in measured.items():
        figures, title = Rounds(one["rounds"]), way_of(one)
        texts.append(figures.table(title, WHOLE))
        panels.append(figures.panel(title))
        name = f"ring step / max(compute, messages), where messages alone take {share} of compute"
        aims.append(Aim(name, figures.over_bound(RING), _MOST_OVER_BOUND))
    return Report("\n".join(texts), aims, panels, measured)


def context_run(way: str | None) -> RunConfig:
    """One sequence on each rank, or on all; `way` is --cp-comm-type, None: without context parallelism."""
    return run_config(
        _TOKENS, num_layers=2, hidden_size=64, ffn_hidden_size=176, num_attention_heads=2, num_query_groups=1,
        kv_channels=32, vocab_size=512, nproc_per_node=_NUM_RANKS, cp_comm_type=way,
        context_parallel_size=_NUM_RANKS if way else 1, global_batch_size=1 if way else _NUM_RANKS,
    )  # fmt: skip


class _Arrived(NamedTuple):
    """A message that is there."""

    tensor: torch.Tensor

    def wait(self) -> torch.Tensor:
        return self.tensor


class _WaitingGroup(ContextGroup):
    """Waits for each message as soon as it is on its way."""

    def start_shift(self, tensor: torch.Tensor, *, is_reverse: bool = False) -> Any:
        return _Arrived(super().start_shift(tensor, is_reverse=is_reverse).wait())


class _SilentGroup(ContextGroup):
    """Sends nothing: a rank gets its own messages, at once. The results are wrong, the work is the same."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.numels: list[int] = []
        """Of all messages."""

    def start_shift(self, tensor: torch.Tensor, *, is_reverse: bool = False) -> Any:
        self.numels.append(tensor.numel())
        return _Arrived(tensor)


def ring_step(
    config: RunConfig, groups: ProcessGroupCollection, context_group: ContextGroup | None = None
) -> Callable[[], float]:
    """What does forward and backward of one step, and gives the loss of this rank's tokens.

    Args:
        config: the run.
        groups: the process groups of this rank.
        context_group: sends the messages; None: the layers' own.
    """
    (stage,) = stages = build_llama_model(config.model, groups, CPU.device, config.execution)
    initialize_weights(stages, config.model, config.training.seed)
    (batch,) = SameBatches(config, 0).batches
    batch = cut_batch(batch, Zigzag.of(groups.cp))
    learned = LearnedTokens(batch.loss_mask, 1.0)
    for layer in stage.decoder.layers if context_group else ():
        layer.self_attention.core_attention.group = context_group

    def step() -> float:
        loss = stage(batch.tokens, None, None, labels=batch.labels, loss_mask=learned)
        loss.backward()
        stage.zero_grad()
        return loss.item()

    return step


def build_contenders(groups: ProcessGroupCollection) -> dict[str, Callable[[], object]]:
    """All contenders by name, on this rank; `groups` have all ranks as a context-parallel group."""
    alone = copy.copy(groups)
    alone.cp = alone.dp_cp = dist.new_subgroups(1)[0]
    ring, silent, own = context_run("p2p"), _SilentGroup(groups.cp), ContextGroup(groups.cp)
    found: dict[str, Callable[[], object]] = {
        WHOLE: ring_step(context_run(None), alone),
        RING: ring_step(ring, groups),
        WAITING_RING: ring_step(ring, groups, _WaitingGroup(groups.cp)),
        ALL_TO_ALL: ring_step(context_run("a2a"), groups),
        COMPUTE: ring_step(ring, groups, silent),
    }
    found[COMPUTE]()
    messages = [torch.zeros(numel) for numel in silent.numels]
    return found | {COMMUNICATION: lambda: [own.start_shift(message).wait() for message in messages]}


def measure_ring(context: DeviceContext, shares: Sequence[float], rounds: int) -> dict[str, Any]:
    """By share: the speed, and the seconds of each contender in each round; equal on both ranks.

    Args:
        context: the device.
        shares: see _SHARES.
        rounds: how often each contender takes a step.
    """
    contenders = build_contenders(initialize(context_run("p2p"), context))
    timed = {name: partial(time_on_ranks, step, CPU) for name, step in contenders.items()}
    return {f"{share:g}": compare(timed, rounds, share) for share in shares}


def offload(share: float) -> str:
    """The name of the contender whose copy of a layer takes `share` of the layer's forward."""
    return f"offload, copy {share:g} of forward"


class _Copied:
    """The event at the end of copies; the host is the stream of a CPU."""

    def __init__(self, future: Future[None]) -> None:
        self.synchronize = self.wait = future.result


class PacedDevice(SimulatedDevice):
    """A simulated device whose copies go beside compute: one queue each way, at a speed."""

    def __init__(self) -> None:
        super().__init__(_PLENTY)
        self.bytes_per_s = float("inf")
        self._to_host, self._to_device = (ThreadPoolExecutor(1, initializer=same_device()) for _ in range(2))

    def copy_to_host(self, copies: Copies, after: Event) -> Event:
        """Copy beside compute; on a CPU `after` is over."""
        return _Copied(self._to_host.submit(self._copy, copies))

    def copy_to_device(self, copies: Copies, after: Event | None = None) -> Event:
        """Copy beside compute."""
        return _Copied(self._to_device.submit(self._copy, copies))

    def _copy(self, copies: Copies) -> None:
        end = time.perf_counter() + sum(source.nbytes for source, _ in copies) / self.bytes_per_s
        for source, target in copies:
            target.copy_(source)
        time.sleep(max(end - time.perf_counter(), 0.0))


class _Activations:
    """The steps of a run that keeps, offloads or recomputes activations, on a simulated device."""

    def __init__(self, groups: ProcessGroupCollection, config: RunConfig) -> None:
        self._trainer, self.device = OurTrainer(config, groups, CPU.device), PacedDevice()
        self._offload = self._trainer.run.activation_offload
        if self._offload is not None:
            self._offload.device = self.device

    def step(self, bytes_per_s: float = float("inf")) -> dict[str, float]:
        """Figures of a step: seconds, peak bytes of the device, loss; bytes sent to the host, seconds of
        waiting."""
        self.device.bytes_per_s = bytes_per_s
        self.device.pop_peak_bytes()
        begin = time.perf_counter()
        with self.device.count_activations():
            loss = self._trainer.step()
        seconds = time.perf_counter() - begin
        found = {"seconds": seconds, "peak_bytes": self.device.pop_peak_bytes(), "loss": loss}
        if self._offload is None:
            return {**found, "sent_bytes": 0, "waited_s": 0.0}
        waited_s = self._offload.pop_wait_ms() / 1e3
        return {**found, "sent_bytes": self._offload.pop_bytes(), "waited_s": waited_s}


def activation_run(**training: Any) -> RunConfig:
    """The run that all contenders train."""
    return run_config(
        _LENGTH, num_layers=_LAYERS, hidden_size=256, ffn_hidden_size=704, num_attention_heads=4,
        num_query_groups=2, kv_channels=64, vocab_size=512, **training,
    )  # fmt: skip


def measure_activations(shares: Sequence[float], rounds: int) -> dict[str, list[dict[str, float]]]:
    """What each contender's step took in each round; see _COPY_SHARES."""
    with job(CPU):
        groups = initialize(activation_run(), CPU)
        keep, recompute, offloading = (
            _Activations(groups, activation_run(**training))
            for training in ({}, {"recompute_granularity": "full"}, {"cpu_offloading": True})
        )
        seconds = median(keep.step()["seconds"] for _ in range(3))
        offloading.step()
        layer_bytes = offloading.step()["sent_bytes"] / (_LAYERS - 1)
        speed = layer_bytes / (seconds * _FORWARD_SHARE / _LAYERS)
        ways = {KEEP: keep.step, RECOMPUTE: recompute.step}
        ways |= {offload(share): partial(offloading.step, speed / share) for share in shares}
        return take_turns(ways, rounds)


def _activations(is_quick: bool, rounds: int) -> Report:
    measured = measure_activations(_COPY_SHARES, rounds)
    return Report(activation_table(measured), [], [], measured)


def activation_table(measured: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """A row for each way; see `measure_activations`."""
    def middle(key: str, name: str) -> float:
        return median(one[key] for one in measured[name])

    columns: Columns = {
        "peak MiB": lambda name: f"{middle('peak_bytes', name) / 2**20:.1f}",
        "to host MiB": lambda name: f"{middle('sent_bytes', name) / 2**20:.1f}",
        "waited s": lambda name: f"{middle('waited_s', name):.3f}",
    }
    seconds = {name: [one["seconds"] for one in found] for name, found in measured.items()}
    return Rounds(seconds).table("", KEEP, columns)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
