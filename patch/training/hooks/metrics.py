"""The metrics of a run: log/metrics.jsonl, TensorBoard and log/loss.png, written by rank 0.

metrics.jsonl has one JSON object per logged iteration and one per evaluation; a test fixes the keys. A resume
removes the lines after the checkpoint, so that no iteration appears twice.
"""

from __future__ import annotations

import os
import resource
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import psutil
import torch
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from patch.errors import CheckpointError
from patch.logger import get_logger
from patch.model.experts.layer import EXTRA_STATS, routers_of
from patch.plan.flops import flops_per_step, peak_flops
from patch.storage.atomic import write_atomically
from patch.storage.names import LOSS_PLOT_FILE, METRICS_FILE, TENSORBOARD_FOLDER
from patch.storage.text_files import parse_json, read_small
from patch.training.hooks.hook import Record, TrainerHook
from patch.training.setup import Run
from patch.training.step import StepResult

_GIB = 2**30
MOST_BYTES = 4 * _GIB
"""The largest metrics.jsonl that is read: ten million steps."""
_LOSS_TITLE = "loss (mean over learned tokens, or over pairs)"
_OF_EXPERTS = {
    "expert_load_max": "tokens of the busiest expert / mean",
    "expert_load_min": "tokens of the idlest expert / mean",
    "expert_dropped": "share of choices without a place",
    "aux_loss": "auxiliary loss, without its factor",
    "z_loss": "z loss, without its factor",
}
"""Metrics of a layer's experts -> title in the plot."""
_OF_PAIRS = {
    "rewards": "rewards of pairs, and the share that is in order",
    "logps": "log-probabilities of answers",
}
"""Metrics of an objective with pairs -> title in the plot."""
_OF_TASKS = "scores of tasks, with their errors: "
_MOST_NAMED = 20
"""A plot with more lines has no legend."""
_logger = get_logger(__name__)


def measured(run: Run, result: StepResult, step_time_ms: float) -> dict[str, float]:
    """Return the metrics of a step that differ between ranks; the record has the maximum over ranks.

    On a GPU, memory is GPU memory; on the CPU, it is the memory of the process. The loss is -inf on stages
    before the last.
    """
    report, offload = run.optimizer.report(), dict[str, float]()
    if (activations := run.activation_offload) is not None:  # compute waited for copies of this size
        offload["activation_offload_gib"] = activations.pop_bytes() / _GIB
        offload["activation_wait_ms"] = activations.pop_wait_ms()
    if report.speculation_failure_rate is not None:
        offload["speculation_failure_rate"] = report.speculation_failure_rate
    if run.config.optimizer.offload_folder is not None:  # since the start
        offload |= {"disk_moved_gib": report.disk_moved_bytes / _GIB, "disk_wait_s": report.disk_wait_s}
    return {
        **offload,
        "loss": result.loss,
        **result.extra_metrics,
        "step_time_ms": step_time_ms,
        "comm_exposed_ms": result.comm_exposed_ms,
        "data_wait_ms": result.data_wait_ms,
        "peak_memory_gib": max(_peak_memory(run.device), report.largest_peak) / _GIB,
        "host_memory_gib": psutil.Process().memory_info().rss / _GIB,
        "offload_fraction": report.offload_fraction,
    }


def make_record(
    run: Run, iteration: int, result: StepResult, worst: dict[str, float]
) -> dict[str, float | None]:
    """Return an object of metrics.jsonl.

    Tokens are positions that the model computed, including padding. `hfu` includes recomputation; `mfu` and
    `hfu` are None if the device's peak is not known. `iteration` counts from 1; `worst` has the maximum over
    ranks of each metric of `measured`.
    """
    config, consumed = run.config, run.consumed_samples(iteration)
    tokens = config.training.global_batch_size * config.sample_length
    process_seconds = config.world_size * worst["step_time_ms"] / 1e3
    flops = flops_per_step(config, result.attended_pairs or None)
    speed, hardware_speed = (count / process_seconds for count in flops)
    peak = None
    if run.device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(run.device), config.training.precision)
    return {
        "iteration": iteration,
        "consumed_samples": consumed,
        "consumed_tokens": consumed * config.sample_length,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "tokens_per_s_per_gpu": tokens / process_seconds,
        "tflops_per_gpu": speed / 1e12,
        "hardware_tflops_per_gpu": hardware_speed / 1e12,
        "mfu": speed / peak if peak else None,
        "hfu": hardware_speed / peak if peak else None,
        "skipped": result.skipped,
        **worst,
    }


def loads_of_experts(run: Run) -> dict[str, float]:
    """Return the expert loads of each MoE layer, by layer number from 1, in the last step; collective.

    `expert_load_max` and `expert_load_min` are the tokens of the busiest and the idlest expert over the mean.
    `expert_dropped` is the share of choices that exceeded an expert's capacity. `aux_loss` and `z_loss` are
    means without their factors.
    """
    model = run.config.model
    if not model.num_experts:
        return {}
    counts = torch.zeros(
        model.num_layers, model.num_experts + len(EXTRA_STATS), dtype=torch.float64, device=run.device
    )
    for router in routers_of(run.stages):
        counts[router.layer_number - 1] = router.counts
    torch.distributed.all_reduce(counts)
    found: dict[str, float] = {}
    for number, (*loads, dropped, aux_loss, z_loss) in enumerate(counts.tolist(), 1):
        if chosen := sum(loads) + dropped:
            mean = max(sum(loads), 1) / len(loads)
            values = (max(loads) / mean, min(loads) / mean, dropped / chosen, aux_loss, z_loss)
            found |= {f"{name}/{number}": value for name, value in zip(_OF_EXPERTS, values, strict=True)}
    return found


def _peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes since the start, or since the optimizer's last `record_memory`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class _Board:
    """A TensorBoard file; `first_step` makes TensorBoard drop this and later steps from before a resume.

    torch's SummaryWriter writes in its own thread, where a full disk only causes a traceback.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("wb")
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        self._write(step=first_step, session_log=SessionLog(status=SessionLog.START))
        self.close = self._file.close

    def add(self, record: Record) -> None:
        scalars = {name: value for name, value in record.items() if name != "iteration" and value is not None}
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._write(step=int(record["iteration"] or 0), summary=Summary(value=values))
        self._file.flush()

    def _write(self, **fields: Any) -> None:
        self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())


class MetricsLog(TrainerHook):
    """Writes metrics.jsonl and the TensorBoard files; removes lines of steps after `start_iteration`."""

    def __init__(self, output: Path, start_iteration: int) -> None:
        self.path = output / METRICS_FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # A new run keeps no old lines, and is evaluated before its first step.
        known = read_metrics(self.path) if start_iteration else []
        kept = [record for record in known if record["iteration"] <= start_iteration]
        write_atomically(self.path, b"".join(orjson.dumps(record) + b"\n" for record in kept))
        self._file = self.path.open("ab")
        self._board = _Board(output / TENSORBOARD_FOLDER, start_iteration + 1)

    def on_log(self, record: Record) -> None:
        """Append the object of a step or an evaluation, and its TensorBoard scalars.

        Raises:
            CheckpointError: the file cannot be written, for example because the disk is full.
        """
        try:
            self._file.write(orjson.dumps(record) + b"\n")
            self._file.flush()
            self._board.add(record)
        except OSError as error:
            raise CheckpointError(f"{self.path} could not be written: {error}; free space, resume") from error

    on_evaluate = on_log

    def close(self) -> None:
        """Close the files; a failure is only logged, so that it does not hide an earlier error."""
        for finish in (self._file.close, self._board.close):
            try:
                finish()
            except OSError as error:
                _logger.error("%s: %s", self.path.parent, error)


def read_metrics(path: Path) -> list[Record]:
    """Return the objects of a metrics.jsonl, without lines that a crash cut short; [] if there is no file."""
    if not path.exists():
        return []
    records = []
    for line in read_small(path, MOST_BYTES).splitlines():
        with suppress(ValueError):
            record = parse_json(line)
            if _is_record(record):
                records.append(record)
    return records


def _is_record(values: Any) -> bool:
    """Return whether a line is a record of `MetricsLog`; other programs may have written other lines."""
    return (
        isinstance(values, dict)
        and isinstance(values.get("iteration"), int)
        and all(isinstance(value, int | float | None) for value in values.values())
    )


class LossPlot(TrainerHook):
    """Draws the losses in metrics.jsonl; a failure is only logged, because the plot can be drawn later."""

    def __init__(self, output: Path) -> None:
        self._metrics, self._path = output / METRICS_FILE, output / LOSS_PLOT_FILE

    def on_save(self, iteration: int) -> None:
        """Draw the losses up to the checkpoint."""
        self.close()

    def close(self) -> None:
        """Draw all losses."""
        try:
            plot_losses(read_metrics(self._metrics), self._path)
        except OSError as error:
            _logger.error("%s was not drawn: %s", self._path, error.strerror)


def plot_losses(records: list[Record], path: Path) -> None:
    """Draw training and validation loss over the steps into a PNG file, then experts, pairs and tasks."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    keys = dict.fromkeys(key for record in records for key in record if "/" in key)
    of_sets = [(key, key.removeprefix("valid_loss/"), ".--") for key in keys if key.startswith("valid_loss/")]
    panels = {_LOSS_TITLE: [("loss", "training", "-"), ("valid_loss", "validation", "o-"), *of_sets]}
    for name, title in {**_OF_EXPERTS, **_OF_PAIRS}.items():
        label = "layer " if name in _OF_EXPERTS else ""
        if lines := [(key, label + key.split("/")[1], "-") for key in keys if key.startswith(f"{name}/")]:
            panels[title] = lines
    for key in keys:
        if key.startswith("tasks/") and not key.endswith("_stderr"):
            _, task, metric = key.split("/", 2)
            panels.setdefault(f"{_OF_TASKS}{metric}", []).append((key, task, "o-"))
    figure = Figure(figsize=(8, 5 * len(panels)))
    FigureCanvasAgg(figure)
    for number, (title, lines) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(len(panels), 1, number, xlabel="iteration", ylabel=title)
        for key, label, style in lines:
            own = [record for record in records if key in record]
            if points := [(record["iteration"], record[key]) for record in own]:
                axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1, markersize=4)
            if title.startswith(_OF_TASKS):
                for (iteration, value), record in zip(points, own, strict=True):
                    error = record.get(f"{key}_stderr", 0.0)
                    axes.vlines(iteration, value - error, value + error, colors="gray", linewidth=1)
        axes.grid(alpha=0.3)
        if 0 < len(axes.lines) <= _MOST_NAMED:
            axes.legend()
    figure.savefig(path, dpi=120)
