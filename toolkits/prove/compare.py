"""Compare two runs name by name: the first difference, and common properties of all differing tensors.

It reads the folders of the runs: log/metrics.jsonl, the evidence of `worker.py`, and checkpoints of any
layout.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch

from patch.config import RunConfig
from patch.config.choices import PRECISIONS
from patch.convert.stored_weights import StoredWeights
from patch.families import Kind, weight_rows
from patch.families.adapters import adapter_rows
from patch.optimizer.muon import FACTORS
from patch.storage.names import CHECKPOINT_FOLDER, METRICS_FILE, iteration_name
from patch.storage.text_files import parse_json, read_json, read_small
from toolkits.prove.worker import EVIDENCE, GRADIENTS


class Bounds(NamedTuple):
    """Largest relative differences that other orders of summation and other rounding explain."""

    number: float
    """Bound of losses and norms."""
    gradient: float
    """Bound of a gradient or a first moment, by L2 norms. The bound of a second moment is twice as large."""
    weight: float
    """Bound of a weight (its master), in units of the step's update."""


BOUNDS = {
    "fp32": Bounds(5e-6, 5e-5, 3e-4), "fp16": Bounds(1e-3, 2e-2, 6e-2), "bf16": Bounds(3e-3, 0.1, 0.12),
    "fp8": Bounds(3e-2, 0.4, 0.6),
}  # fmt: skip
"""Three times the largest difference in tests/covered_layouts.md, more in fp32, two times in fp8."""
_EXPERTS = "experts"
_CUTS = {kind: "cut over TP by rows" for kind in Kind} | {
    Kind.REPLICATED: "not cut over TP", Kind.ROW_PARALLEL: "cut over TP by columns",
}  # fmt: skip
ROUNDED = Bounds(1e-3, 1e-2, 2e-2)
"""Lower limits of the bounds if gradients are sent as bf16."""
_NAMED = 3
SMALLEST = 1e-3
"""Smallest scale of a tensor, relative to the average of all: noise in a zero tensor is no difference."""
GRADIENT = "gradient"
STATES = {
    "first moment": ("optimizer.state.exp_avg", 1),
    "second moment": ("optimizer.state.exp_avg_sq", 2),
    "momentum": ("optimizer.state.momentum_buffer", 1),
}
"""Kind of states -> the prefix of their keys, and the factor of their bound beside a gradient's."""
Tensors = dict[str, torch.Tensor]
"""Hugging Face name -> tensor."""


class Difference(NamedTuple):
    """A value that differs between the two runs."""

    what: str
    """Kind, step, and the Hugging Face name of a tensor."""
    distance: float
    bound: float
    detail: str = ""
    """Common properties of the differing tensors."""

    def __str__(self) -> str:
        bound = f"differs by {self.distance:.2g}, bound {self.bound:.2g}" if self.bound else "is not equal"
        return f"{self.what} {bound}" + (f"; {self.detail}" if self.detail else "")


class Comparison(NamedTuple):
    """Result of a comparison."""

    largest: dict[str, tuple[float, float]]
    """Kind -> its largest difference, its bound."""
    differences: list[Difference]
    """First difference of each kind and step, in the order in which a step computes them."""


class _Found(NamedTuple):
    kind: str
    distance: float
    bound: float
    difference: Difference | None
    """The difference, or None if the distance is within the bound."""


def compare(layout: RunConfig, one: RunConfig, steps: Sequence[int]) -> Comparison:
    """Compare two runs that have ended.

    Args:
        layout: the run in its layout.
        one: the single-process run.
        steps: numbers of the compared steps, from 1.
    """
    ours, theirs, bounds = _Folder(layout), _Folder(one), _bounds(layout)
    found = [each for step in steps for each in _step(ours, theirs, step, bounds)]
    found.append(_number(ours, theirs, "evaluation", steps[-1], bounds.number))
    largest: dict[str, tuple[float, float]] = {}
    for kind, distance, bound, _ in found:
        largest[kind] = max(distance, *largest.get(kind, (0.0, 0.0))[:1]), bound
    return Comparison(largest, [each.difference for each in found if each.difference is not None])


def _bounds(run: RunConfig) -> Bounds:
    own = [BOUNDS[run.training.precision], *[BOUNDS["bf16"]] * (run.optimizer.main_grads_dtype == "bf16")]
    own += [ROUNDED] * run.optimizer.grad_reduce_in_bf16
    if run.optimizer.optimizer == "muon":  # its iterations in bf16 enlarge small directions, with their noise
        own.append(BOUNDS["bf16" if run.training.precision == "fp32" else "fp8"])
    if run.model.num_experts and run.training.precision != "fp32":
        own.append(BOUNDS["fp8"])  # the runs may choose different, nearly equal experts for a token
    return Bounds(*map(max, zip(*own, strict=True)))


def _step(ours: _Folder, theirs: _Folder, step: int, bounds: Bounds) -> Iterator[_Found]:
    layout, evidence = ours.run, ours.evidence[str(step)]
    shares, of_theirs = (run.world_size // run.num_weight_copies for run in (layout, theirs.run))
    expected = [shares * number // of_theirs for number in theirs.evidence[str(step)]["tokens"]]
    wrong = [f"{evidence['tokens']} of {expected}"] if evidence["tokens"] != expected else []
    yield _equal("tokens", f"tokens of step {step} (number, with a loss, hash)", wrong)
    loss = _number(ours, theirs, "loss", step, bounds.number)
    yield loss
    kinds = [("gradient", GRADIENT, bounds.gradient), ("weight", "", bounds.weight)]
    kinds += [(kind, state, factor * bounds.gradient) for kind, (state, factor) in STATES.items()]
    for kind, state, bound in kinds:
        pair = ours.tensors(step, state), theirs.tensors(step, state)
        if not pair[1]:  # this optimizer has no such state
            continue
        scales = theirs.updates(step) if kind == "weight" else _norms(pair[1])
        distances = _distances(*pair, scales)
        if kind == "gradient" and loss.difference is None:  # backward ends with the embedding
            distances = dict(reversed([*distances.items()]))
        difference = _first(f"{kind} of step {step}", distances, pair, layout, bound)
        yield _Found(kind, max(distances.values()), bound, difference)
        if kind == "gradient":
            yield _number(ours, theirs, "gradient norm", step, bounds.number)
    yield _equal("copies", f"copies on ranks after step {step}", evidence["unequal"])


def _equal(kind: str, what: str, wrong: list[str]) -> _Found:
    detail = ", ".join(wrong[:_NAMED]) + (", ..." if wrong[_NAMED:] else "")
    return _Found(kind, float(bool(wrong)), 0, Difference(what, 1, 0, detail) if wrong else None)


class _Folder:
    def __init__(self, run: RunConfig) -> None:
        self.run, self._folder = run, Path(run.checkpoint.output_path)
        self.evidence: dict[str, Any] = read_json(self._folder / EVIDENCE)
        self._records = [*map(parse_json, read_small(self._folder / METRICS_FILE).splitlines())]

    def record(self, step: int, name: str) -> float:
        found = [each[name] for each in self._records if each["iteration"] == step and name in each]
        return float(found[-1])

    def tensors(self, step: int, state: str) -> Tensors:
        """Return a state after a step, by the prefix of its keys. "" means the weights, or their masters."""
        adapter = self.run.adapter if self.run.adapter.lora_rank else None
        prefix = f"{state}." if state else "" if adapter else None
        folder = self._folder / (GRADIENTS if state == GRADIENT else CHECKPOINT_FOLDER) / iteration_name(step)
        stored = StoredWeights(folder, self.run.model, prefix, adapter)
        found, kept_as = stored.tensors(), PRECISIONS[self.run.training.precision].kept_as
        if state or {*stored.dtypes.values()} == {torch.float32}:  # fp32 values need no master
            return found
        if kept_as == "fp16":
            return self.tensors(step, "optimizer.state.master")
        low, zero = self.tensors(step, "optimizer.state.master_low"), torch.zeros(())
        return {
            name: (high.float().view(torch.int32) + low.get(name, zero).int()).view(torch.float32).double()
            for name, high in found.items()
        }

    def updates(self, step: int) -> dict[str, float]:
        """Return the L2 norm of each weight's update in this step, without Adam's or Muon's weight decay."""
        optimizer, rate = self.run.optimizer, self.record(step, "lr")
        kept, second, momenta = (self.tensors(step, state) for state, _ in STATES.values())
        of_first, of_second = (1 - beta**step for beta in (optimizer.adam_beta1, optimizer.adam_beta2))
        of_b = self.run.adapter.lora_plus_ratio or 1.0
        steps = kept or self.tensors(step, GRADIENT)
        if second:
            steps = {
                name: moment / of_first / ((second[name] / of_second).sqrt() + optimizer.adam_eps)
                for name, moment in kept.items()
            }
        found = {name: float(each.norm()) for name, each in steps.items()}
        for name, each in momenta.items():  # the singular values of an orthogonalized matrix are near 1
            factor = FACTORS[optimizer.muon_scale_mode](*each.shape) * optimizer.muon_extra_scale_factor
            found[name] = min(each.shape) ** 0.5 * factor
        return {name: rate * size * (of_b if "lora_B" in name else 1.0) for name, size in found.items()}


def _number(ours: _Folder, theirs: _Folder, kind: str, step: int, bound: float) -> _Found:
    key = {"evaluation": "valid_loss", "gradient norm": "grad_norm"}.get(kind, kind)
    a, b = ours.record(step, key), theirs.record(step, key)
    distance = abs(a - b) / max(abs(b), 1e-12)
    detail = f"{a:.7g}, other side {b:.7g}"
    difference = Difference(f"{kind} of step {step}", distance, bound, detail)
    return _Found(kind, distance, bound, None if distance <= bound else difference)


def _norms(tensors: Tensors) -> dict[str, float]:
    """Return the L2 norm of each tensor, at least `SMALLEST` of the average for a tensor of its size."""
    square, count = (sum(of(each) for each in tensors.values()) for of in (_square, torch.numel))
    least = SMALLEST * (square / count) ** 0.5
    return {name: max(_square(each), least**2 * each.numel()) ** 0.5 for name, each in tensors.items()}


def _square(tensor: torch.Tensor) -> float:
    return float(tensor.square().sum())


def _distances(ours: Tensors, theirs: Tensors, scales: Mapping[str, float]) -> dict[str, float]:
    """Divide by the scales; a weight without an update, and so without a scale, must have the same bits."""
    scale = {name: max(scales.get(name, 0.0), 1e-30) for name in theirs}
    found = {name: float((ours[name] - b).norm()) / scale[name] for name, b in theirs.items()}
    return {name: distance if math.isfinite(distance) else math.inf for name, distance in found.items()}


def _first(
    what: str, distances: dict[str, float], pair: tuple[Tensors, Tensors], layout: RunConfig, bound: float
) -> Difference | None:
    """Return the first tensor beyond the bound with details, or None."""
    wrong = [name for name, distance in distances.items() if not distance <= bound]
    if not wrong:
        return None
    first, labels = wrong[0], _labels(layout)
    a, b = (each[first] for each in pair)
    details = [_shared({*wrong}, [*pair[1]], labels), _part(a, b, labels[first], layout), _factor(a, b)]
    return Difference(f"{what}: {first}", distances[first], bound, "; ".join(filter(None, details)))


def _labels(layout: RunConfig) -> dict[str, list[str]]:
    """Return Hugging Face name -> properties that the tensor may share with others."""
    model, ends = layout.model, [*accumulate(layout.stage_layers)]
    rows = adapter_rows(model, layout.adapter) if layout.adapter.lora_rank else weight_rows(model)
    own = (model.num_experts or 1) // layout.experts.expert_model_parallel_size
    found = {}
    for row, kind in ((each, kind) for each in rows for kind in each.hf):
        for layer, expert in itertools.product(row.layers, range(row.num_experts)):
            name = kind.replace("*", str(layer)).replace("#", str(expert))
            labels = [_CUTS[row.kind], f"all {kind}"]
            if row.is_per_layer:
                stage = next(number for number, end in enumerate(ends) if layer < end)
                stage %= layout.parallel.pipeline_model_parallel_size
                labels += ["layers", f"layer {layer}", f"layers of pipeline rank {stage}"]
            labels += ["norms"] * ("norm" in name) + ["biases"] * name.endswith("bias")
            if "#" in kind:
                labels += [_EXPERTS, f"experts of EP rank {expert // own}"]
            elif model.num_experts:
                labels.append("all but experts")
            found[name] = labels
    return found


def _shared(wrong: set[str], names: list[str], labels: Mapping[str, list[str]]) -> str:
    """Describe the smallest set of tensors with a common property that contains all wrong ones."""
    if len(wrong) == 1:
        return "no other one"
    last = max(map(names.index, wrong))
    sets = {"all tensors": {*names}, f"what is up to {names[last]}": {*names[: last + 1]}}
    for name in names:
        for label in labels[name]:
            sets.setdefault(label, set()).add(name)
    fitting = [(len(found), label) for label, found in sets.items() if wrong <= found]
    number, label = min(fitting)
    return f"{'all' if len(wrong) == number else len(wrong)} of {number}: {label}"


def _part(a: torch.Tensor, b: torch.Tensor, labels: list[str], layout: RunConfig) -> str:
    """Name the TP rank, if only its part differs."""
    size = layout.etp_size if _EXPERTS in labels else layout.parallel.tensor_model_parallel_size
    if labels[0] == _CUTS[Kind.REPLICATED] or size == 1:
        return ""
    axis = int(labels[0] == _CUTS[Kind.ROW_PARALLEL])
    parts = [_square(part) for part in (a - b).tensor_split(size, axis)]
    wrong = [rank for rank, part in enumerate(parts) if part > 0.01 * sum(parts)]
    return f"in the part of TP rank {wrong[0]} alone" if len(wrong) == 1 else ""


def _factor(a: torch.Tensor, b: torch.Tensor) -> str:
    """Name the factor between the tensors, if it explains the difference."""
    factor = float((a * b).sum() / max(float((b * b).sum()), 1e-30))
    is_scaled = float((a - factor * b).norm()) < 0.02 * float((a - b).norm())
    return f"it is {factor:.4g} times that of the other side" if is_scaled else ""
