"""What two runs of the same numbers have computed, name by name; the first difference, and what others share with it.

Both are read from their folders: log/metrics.jsonl, the evidence of `worker.py` and checkpoints, whatever the
layouts in which they were saved.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch

from patch.config import RunConfig
from patch.convert.stored_weights import StoredWeights
from patch.families import Kind, weight_rows
from patch.families.adapters import adapter_rows
from patch.storage.names import CHECKPOINT_FOLDER, METRICS_FILE, iteration_name
from toolkits.prove.worker import EVIDENCE, GRADIENTS


class Bounds(NamedTuple):
    """The largest differences that other orders of sums and roundings explain, all relative."""

    number: float
    """Of losses and norms."""
    gradient: float
    """Of a gradient or a first moment, by L2 norms; second moments twice that."""
    weight: float
    """Of a weight (its master), in units of the step's update."""


BOUNDS = {
    "fp32": Bounds(1e-5, 1e-4, 1e-3), "fp16": Bounds(2e-3, 3e-2, 0.1), "bf16": Bounds(5e-3, 0.1, 0.2),
    "fp8": Bounds(2e-2, 0.3, 0.4),
}  # fmt: skip
SMALLEST = 1e-3
"""Of gradients as a whole: what a smaller tensor's is measured by, so that zero may differ from zero."""
Tensors = dict[str, torch.Tensor]
"""By their names in Hugging Face."""


class Difference(NamedTuple):
    """Something that the two runs do not have in common."""

    what: str
    """Of which step, and where it is a tensor its name in Hugging Face."""
    distance: float
    bound: float
    detail: str = ""
    """What other differences have in common with it."""

    def __str__(self) -> str:
        bound = f"differs by {self.distance:.2g}, bound {self.bound:.2g}" if self.bound else "is not equal"
        return f"{self.what} {bound}" + (f"; {self.detail}" if self.detail else "")


class Comparison(NamedTuple):
    """All that was compared."""

    largest: dict[str, tuple[float, float]]
    """Of each kind: the largest difference, and its bound."""
    differences: list[Difference]
    """The first one of each kind and step, in the order in which a step computes them."""


def compare(layout: RunConfig, one: RunConfig, steps: Sequence[int]) -> Comparison:
    """Compare two runs that have ended.

    Args:
        layout: the run in its layout.
        one: that of one process.
        steps: counted from 1.
    """
    bounds, largest, differences = BOUNDS[layout.training.precision], dict[str, tuple[float, float]](), []
    for kind, difference, distance, bound in _all(layout, one, steps, bounds):
        before = largest.get(kind, (0.0, bound))[0]
        largest[kind] = (max(before, distance) if distance == distance else math.inf, bound)
        if difference is not None:
            differences.append(difference)
    return Comparison(largest, differences)


def _all(
    layout: RunConfig, one: RunConfig, steps: Sequence[int], bounds: Bounds
) -> Iterator[tuple[str, Difference | None, float, float]]:
    """Kind, the difference if it is beyond its bound, the largest distance, and the bound."""
    ours, theirs = _Folder(layout), _Folder(one)
    shares = layout.world_size // layout.num_weight_copies
    for step in steps:
        a, b = ours.evidence[str(step)], theirs.evidence[str(step)]
        is_same = a["tokens"] == [shares * number for number in b["tokens"]]
        yield "tokens", None if is_same else Difference(f"tokens of step {step}", 1, 0), float(not is_same), 0
        is_forward_right = True
        for difference, distance in _numbers(ours, theirs, step, "loss", bounds.number):
            is_forward_right = difference is None
            yield "loss", difference, distance, bounds.number
        quantities: list[tuple[str, Callable[[_Folder, int], Tensors]]] = [("gradient", _Folder.gradients), ("weight", _Folder.masters)]
        quantities += [("first moment", _Folder.exp_avg), ("second moment", _Folder.exp_avg_sq)]
        for kind, read in quantities:
            if kind == "weight":
                for difference, distance in _numbers(ours, theirs, step, "grad_norm", bounds.number):
                    yield "gradient norm", difference, distance, bounds.number
            pair = [read(each, step) for each in (ours, theirs)]
            scales = theirs.updates(step) if kind == "weight" else _norms(pair[1])
            bound = bounds.weight if kind == "weight" else bounds.gradient * (1 + (kind == "second moment"))
            found = _distances(*pair, scales)
            order = [*reversed(found)] if kind == "gradient" and is_forward_right else [*found]
            difference = _first(f"{kind} of step {step}", order, found, pair, layout, bound)
            yield kind, difference, max(found.values()), bound
        unequal = a["unequal"]
        yield "copies", (
            Difference(f"copies of {unequal[0]} after step {step}", 1, 0, f"and {len(unequal) - 1} others")
            if unequal else None
        ), float(bool(unequal)), 0
    for difference, distance in _numbers(ours, theirs, steps[-1], "valid_loss", bounds.number):
        yield "evaluation", difference, distance, bounds.number


class _Folder:
    """What a run has left."""

    def __init__(self, run: RunConfig) -> None:
        self._run, self._folder = run, Path(run.checkpoint.output_path)
        self.evidence: dict[str, Any] = json.loads((self._folder / EVIDENCE).read_text())
        lines = (self._folder / METRICS_FILE).read_text().splitlines()
        self._records = [json.loads(line) for line in lines]

    def record(self, step: int, name: str) -> float:
        found = [each[name] for each in self._records if each["iteration"] == step and name in each]
        return float(found[-1])

    def _tensors(self, name: str, step: int, prefix: str = "") -> Tensors:
        adapter = self._run.adapter if self._run.adapter.lora_rank else None
        key = prefix or ("" if adapter else None)
        folder = self._folder / name / iteration_name(step)
        return StoredWeights(folder, self._run.model, key, adapter).tensors()

    def gradients(self, step: int) -> Tensors:
        """Of this step."""
        return self._tensors(GRADIENTS, step, "gradient.")

    def exp_avg(self, step: int) -> Tensors:
        """After this step."""
        return self._tensors(CHECKPOINT_FOLDER, step, "optimizer.state.exp_avg.")

    def exp_avg_sq(self, step: int) -> Tensors:
        """After this step."""
        return self._tensors(CHECKPOINT_FOLDER, step, "optimizer.state.exp_avg_sq.")

    def masters(self, step: int) -> Tensors:
        """Weights after this step with all the bits that the optimizer has of them."""
        weights = self._tensors(CHECKPOINT_FOLDER, step)
        if self._run.training.precision == "fp32":
            return weights
        if self._run.training.precision == "fp16":
            return self._tensors(CHECKPOINT_FOLDER, step, "optimizer.state.master.")
        low = self._tensors(CHECKPOINT_FOLDER, step, "optimizer.state.master_low.")
        return {
            name: (high.float().view(torch.int32) + low[name].int()).view(torch.float32).double()
            for name, high in weights.items()
        }

    def updates(self, step: int) -> dict[str, float]:
        """The L2 norm of each weight's update in this step, without decay, by Adam's formula."""
        optimizer, rate = self._run.optimizer, self.record(step, "lr")
        first, second = self.exp_avg(step), self.exp_avg_sq(step)
        of_first, of_second = (1 - beta**step for beta in (optimizer.adam_beta1, optimizer.adam_beta2))
        return {
            name: float(
                (rate * moment / of_first / ((second[name] / of_second).sqrt() + optimizer.adam_eps)).norm()
            )
            for name, moment in first.items()
        }


def _numbers(
    ours: _Folder, theirs: _Folder, step: int, name: str, bound: float
) -> Iterator[tuple[Difference | None, float]]:
    a, b = ours.record(step, name), theirs.record(step, name)
    distance = abs(a - b) / max(abs(b), 1e-12)
    detail = f"{a:.7g}, one process {b:.7g}"
    what = f"{name.replace('grad_', 'gradient ').replace('valid_', 'evaluation ')} of step {step}"
    yield None if distance <= bound else Difference(what, distance, bound, detail), distance


def _norms(tensors: Tensors) -> dict[str, float]:
    """The L2 norm of each tensor, at least a small part of what one of its size has on average."""
    square, count = (sum(of(each) for each in tensors.values()) for of in (_square, torch.numel))
    least = SMALLEST * (square / count) ** 0.5
    return {name: max(_square(each), least**2 * each.numel()) ** 0.5 for name, each in tensors.items()}


def _square(tensor: torch.Tensor) -> float:
    return float(tensor.square().sum())


def _distances(ours: Tensors, theirs: Tensors, scales: Mapping[str, float]) -> dict[str, float]:
    """The distance of each tensor in L2 norms, in units of its scale."""
    found = {name: float((ours[name] - b).norm()) / max(scales[name], 1e-30) for name, b in theirs.items()}
    return {name: distance if math.isfinite(distance) else math.inf for name, distance in found.items()}


def _first(
    what: str,
    order: list[str],
    distances: dict[str, float],
    pair: list[Tensors],
    layout: RunConfig,
    bound: float,
) -> Difference | None:
    wrong = [name for name in order if distances[name] > bound]
    if not wrong:
        return None
    first = wrong[0]
    details = [
        _shared({*wrong}, [*distances], layout), _part(*(each[first] for each in pair), first, layout),
        _factor(*(each[first] for each in pair)),
    ]  # fmt: skip
    return Difference(
        f"{what}: {first}", distances[first], bound, "; ".join(detail for detail in details if detail)
    )


class _Place(NamedTuple):
    """Where a Hugging Face tensor is in the model, and how it is cut."""

    layer: int | None
    expert: int | None
    kind: str
    cut: str
    axis: int | None


def _places(layout: RunConfig) -> dict[str, _Place]:
    model = layout.model
    rows = adapter_rows(model, layout.adapter) if layout.adapter.lora_rank else weight_rows(model)
    cuts = {
        Kind.REPLICATED: ("not cut over TP", None), Kind.ROW_PARALLEL: ("cut over TP by columns", 1),
        Kind.COLUMN_PARALLEL: ("cut over TP by rows", 0), Kind.QKV: ("cut over TP by rows", 0),
        Kind.VOCAB_PARALLEL: ("cut over TP by words", 0),
    }  # fmt: skip
    return {
        kind.replace("*", str(layer)).replace("#", str(expert)): _Place(
            layer if row.is_per_layer else None, expert if row.part == "expert" else None, kind, *cuts[row.kind]
        )
        for row in rows
        for kind in row.hf
        for layer in row.layers
        for expert in range(row.num_experts)
    }


def _shared(wrong: set[str], names: list[str], layout: RunConfig) -> str:
    """The smallest set of tensors with something in common that has all wrong ones."""
    places, sets = _places(layout), {"all tensors": {*names}}
    last = max(map(names.index, wrong))
    sets[f"what is up to {names[last]}"] = {*names[: last + 1]}
    ends = [*accumulate(layout.stage_layers)]
    for name in names:
        place = places[name]
        labels = [place.cut, place.kind]
        if place.layer is not None:
            stage = next(number for number, end in enumerate(ends) if place.layer < end)
            stage %= layout.parallel.pipeline_model_parallel_size
            labels += [f"layer {place.layer}", f"the layers of pipeline rank {stage}", "layers"]
        if place.expert is not None:
            own = (layout.model.num_experts or 1) // layout.experts.expert_model_parallel_size
            labels += ["experts", f"the experts of EP rank {place.expert // own}"]
        else:
            labels += ["what is no expert"]
        labels += ["norms"] * bool(re.search(r"norm|layernorm", name)) + ["biases"] * name.endswith("bias")
        for label in labels:
            sets.setdefault(label, set()).add(name)
    if len(wrong) == 1:
        return "no other one"
    label, members = min(
        ((label, found) for label, found in sets.items() if wrong <= found), key=lambda item: len(item[1])
    )
    extent = "all" if members == wrong else f"{len(wrong)} of {len(members)}"
    return f"{extent} of: {label}" if label != "all tensors" else f"{extent} of all tensors"


def _part(a: torch.Tensor, b: torch.Tensor, name: str, layout: RunConfig) -> str:
    """The TP rank whose part alone differs."""
    place = _places(layout)[name]
    size = layout.etp_size if place.expert is not None else layout.parallel.tensor_model_parallel_size
    if place.axis is None or size == 1:
        return ""
    wrong = [
        float((x - y).norm()) > 0.1 * float((a - b).norm())
        for x, y in zip(a.tensor_split(size, place.axis), b.tensor_split(size, place.axis), strict=True)
    ]
    return f"in the part of TP rank {wrong.index(True)} alone" if sum(wrong) == 1 else ""


def _factor(a: torch.Tensor, b: torch.Tensor) -> str:
    """By which number the tensor is too large, if that explains the difference."""
    factor = float((a * b).sum() / max(float((b * b).sum()), 1e-30))
    is_scaled = float((a - factor * b).norm()) < 0.02 * float((a - b).norm())
    return f"it is {factor:.4g} times that of one process" if is_scaled else ""
