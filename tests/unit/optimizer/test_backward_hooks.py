"""The begin of backward is detected for every output and call of a model, without help of the caller.

Every case is trained on two ranks with accumulation, at every ZeRO stage, and equals autograd on one process
to the bit.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from distributed_runner import run_distributed
from optimizer_runs import LR, ZERO_STAGES, Oracle, data_parallel_groups, failures_of, make_steps, weights_of
from torch.utils.checkpoint import checkpoint

from patch.config.choices import ZeroStage
from patch.config.schema import OptimizerConfig
from patch.optimizer import build_optimizer

# The oracle first sums the gradients of a backward; the optimizer (as torch) adds each gradient as it comes.
REPEATS_BOUND = 1e-7
Loss = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]


@dataclass
class Pair:
    first: torch.Tensor
    second: list[torch.Tensor]


class Opaque:
    """Opaque output of a model."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Model(torch.nn.Module):
    """Returns what `wrap` makes of two tensors; `head` is for the loss."""

    def __init__(self, wrap: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(4)
        self._wrap = wrap
        self.body = torch.nn.Linear(23, 11)
        self.left = torch.nn.Linear(11, 5)
        self.right = torch.nn.Linear(11, 5)
        self.head = torch.nn.Linear(5, 3)

    def forward(self, batch: torch.Tensor) -> Any:
        hidden = torch.tanh(self.body(batch))
        return self._wrap(self.left(hidden), self.right(hidden))


def loss_of(first: torch.Tensor, second: torch.Tensor | None = None) -> torch.Tensor:
    return first.square().mean() if second is None else first.square().mean() + second.sin().sum()


class Case(NamedTuple):
    """One way to build a model and to get a loss from it."""

    loss: Loss
    wrap: Callable = torch.add
    bound: float = 0.0
    compiled: str = ""
    stages: tuple[str, ...] = ()
    """Layers that are stages of their own, and the only ones that are trained."""

    def build(self) -> torch.nn.Module:
        model = Model(self.wrap)
        for name, layer in model.named_children():
            layer.requires_grad_(not self.stages or name in self.stages)
        if self.compiled == "in place":
            model.compile(backend="eager")
        elif self.compiled:
            return torch.compile(model, backend="eager", fullgraph=True)
        return model


def after_a_forward_without_gradient(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        expected = model.eval()(batch)
    return loss_of(model.train()(batch) * 2 - expected)


def beside_a_copy(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A deep copy has a backward of its own, which is no micro-batch of the model."""
    loss_of(copy.deepcopy(model)(batch)).backward()
    return loss_of(model(batch))


def in_checkpoints(model: torch.nn.Module, batch: torch.Tensor, use_reentrant: bool) -> torch.Tensor:
    """Two forwards in one backward, each in a checkpoint."""
    parts = [part.clone().requires_grad_() for part in batch.chunk(2)]
    return loss_of(*(checkpoint(model, part, use_reentrant=use_reentrant) for part in parts))


CASES = {
    "a tensor": Case(lambda model, x: loss_of(model(x))),
    "a tuple": Case(lambda model, x: loss_of(model(x)[0], model(x)[1][0]), lambda a, b: (a, [b])),
    "half of a tuple": Case(lambda model, x: loss_of(model(x)[1]), lambda a, b: (a, b)),
    "a dict": Case(lambda model, x: loss_of(model(x)["a"]), lambda a, b: {"a": a + b, "of": None}),
    "a dataclass": Case(lambda model, x: loss_of(model(x).second[0]), lambda a, b: Pair(a, [a * b])),
    "an object": Case(lambda model, x: loss_of(model(x).value), lambda a, b: Opaque(a * b)),
    "an output used twice": Case(lambda model, x: (lambda y: loss_of(y, y))(model(x))),
    "a head outside of forward": Case(lambda model, x: loss_of(model(x) @ model.head.weight.t())),
    "a weight in the loss": Case(lambda model, x: loss_of(model(x), model.body.weight)),
    "two forwards": Case(lambda model, x: loss_of(model(x[:2]), model(x[2:]))),
    "a forward without gradient": Case(after_a_forward_without_gradient),
    "a deep copy": Case(beside_a_copy),
    "reentrant checkpoint": Case(
        lambda model, x: loss_of(checkpoint(model, x.clone().requires_grad_(), use_reentrant=True))
    ),
    "other checkpoint": Case(lambda model, x: loss_of(checkpoint(model, x, use_reentrant=False))),
    "two reentrant checkpoints": Case(lambda m, x: in_checkpoints(m, x, True), bound=REPEATS_BOUND),
    "two other checkpoints": Case(lambda m, x: in_checkpoints(m, x, False)),
    "torch.compile": Case(lambda model, x: loss_of(model(x)), compiled="in place"),
    "fullgraph": Case(lambda model, x: loss_of(model(x)), compiled="whole graph"),
    "stages in one backward": Case(
        lambda m, x: loss_of(*(m.left(torch.tanh(m.body(part))) for part in x.chunk(2))),
        stages=("body", "left"),
    ),
}


LEFT_OUT = [
    # No memory to wait for the second gradient: an error, see test_micro_batches.py.
    ("two reentrant checkpoints", ZeroStage.GRADIENTS),
    ("two reentrant checkpoints", ZeroStage.PARAMETERS),
    # Read outside of the model's forward, where no rank may gather weights alone: an error, see there.
    *product(("a head outside of forward", "a weight in the loss", "a deep copy"), (ZeroStage.PARAMETERS,)),
    # Compiling takes its time.
    *product(("torch.compile", "fullgraph"), (ZeroStage.NONE, ZeroStage.OPTIMIZER)),
]


class WithLoss(torch.nn.Module):
    """What an oracle takes: a module that returns its loss."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.model, self._loss = case.build(), case.loss

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self._loss(self.model, batch)


def check(case: Case, zero_stage: ZeroStage, rank: int) -> None:
    """Two steps of two micro-batches."""
    model, oracle = case.build(), Oracle(WithLoss(case), zero_stage)
    config = OptimizerConfig(lr=LR, clip_grad=0.5, reduce_bucket_size=100, param_persistence_threshold=0)
    stages = [getattr(model, name) for name in case.stages] or [model]
    optimizer = build_optimizer(stages, config, zero_stage)
    for step in make_steps(2, 2, 2):
        optimizer.zero_grad(LR)
        if case.compiled == "whole graph":  # it refuses to wait
            optimizer.finish_param_sync()
        for index, batch in enumerate(step[rank]):
            with nullcontext() if index else optimizer.no_sync():
                case.loss(model, batch).backward()
        norm = oracle.take_step(step)
        assert optimizer.step().grad_norm == pytest.approx(norm, rel=1e-6)
    expected = weights_of(oracle.model.model)
    with optimizer.full_weights():
        found = weights_of(model)
    for name, weight in found.items():
        assert abs(weight - expected[name]).max() <= case.bound, name


def run_all(rank: int, world_size: int) -> dict[tuple[str, ZeroStage], str]:
    data_parallel_groups()
    checks = {
        (name, zero_stage): partial(check, case, zero_stage, rank)
        for (name, case), zero_stage in product(CASES.items(), ZERO_STAGES)
        if (name, zero_stage) not in LEFT_OUT
    }
    return failures_of(checks)


@pytest.fixture(scope="module")
def failures() -> list[dict[tuple[str, ZeroStage], str]]:
    return run_distributed(run_all, 2)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_autograd(failures: list, name: str) -> None:
    found = [error for rank in failures for (case, _), error in rank.items() if case == name]
    assert len(found) >= 2 and set(found) == {""}
