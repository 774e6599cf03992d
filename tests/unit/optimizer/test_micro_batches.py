"""Micro-batches as other programs have them: several gradients of a weight or none, ranks that differ.

What can be right equals autograd on one process to the bit; what cannot is one error on all ranks.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from distributed_runner import new_job, run_distributed
from optimizer_runs import (
    LR,
    ZERO_STAGES,
    OddModel,
    Oracle,
    Step,
    accumulate,
    assert_same_weights,
    build_optimizer,
    check_training,
    failures_of,
    make_steps,
    take_step,
)
from torch.utils.checkpoint import checkpoint

from patch.config.choices import ZeroStage
from patch.errors import TrainingError
from patch.optimizer import OverlappedDistributedOptimizer as Optimizer

ONES = torch.ones(4, 23)


class Shared(torch.nn.Module):
    """Two checkpointed blocks share a weight; it is registered so that its bucket is the first to be full."""

    def __init__(self, use_reentrant: bool = True) -> None:
        super().__init__()
        torch.manual_seed(2)
        self._use_reentrant = use_reentrant
        self.inner = torch.nn.Linear(23, 23)
        self.other = torch.nn.Linear(23, 23)
        self.shared = torch.nn.Linear(23, 23)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = batch.clone().requires_grad_()
        for own in (self.inner, self.other):
            block = torch.nn.Sequential(own, torch.nn.Tanh(), self.shared, torch.nn.Tanh())
            hidden = checkpoint(block, hidden, use_reentrant=self._use_reentrant)
        return hidden.square().mean()


def a_weight_in_two_reentrant_checkpoints(rank: int, zero_stage: ZeroStage) -> None:
    """In a first step of one micro-batch; with accumulation, and of all weights: test_backward_hooks.py."""
    if not zero_stage.shards_gradients:  # it has no memory to wait with: see the error below
        check_training(rank, zero_stage, Shared, make_steps(3, 2, 1), reduce_bucket_size=1)


def a_second_gradient_of_a_reduced_bucket(rank: int, zero_stage: ZeroStage) -> None:
    """At ZeRO stage `gradients` in any micro-batch; elsewhere where no step before had two."""
    is_sharded = zero_stage.shards_gradients
    for num_micro_batches, is_fused in product((1, 2) if is_sharded else (1,), (False, True)):
        model, changes = Shared(is_sharded), {"gradient_accumulation_fusion": is_fused}
        optimizer = build_optimizer(model, zero_stage, reduce_bucket_size=1, **changes)
        if not is_sharded:
            accumulate(model, optimizer, [ONES])
            model._use_reentrant = True
        with pytest.raises(TrainingError, match=r"shared.*second gradient.*use_reentrant=False"):
            accumulate(model, optimizer, [ONES] * num_micro_batches)


def a_retained_graph_inside_no_sync(rank: int, zero_stage: ZeroStage) -> None:
    def backward(model: OddModel, optimizer: Optimizer, batches: list) -> None:
        optimizer.zero_grad(LR)
        loss = model(batches[0])
        with optimizer.no_sync():
            loss.backward(retain_graph=True)
        loss.backward()

    (step,) = make_steps(1, 2, 1)
    twice = [[of_rank[0], of_rank[0]] for of_rank in step]
    check_training(rank, zero_stage, OddModel, [twice], backward=backward)


def penalized(model: Callable, batch: torch.Tensor, context: Any = None) -> torch.Tensor:
    """A loss and the square of its gradient, whose backward is done in a context."""
    loss = model(batch.requires_grad_())
    with context or nullcontext():
        return loss + torch.autograd.grad(loss, batch, create_graph=True)[0].square().sum()


class Penalized(OddModel):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return penalized(super().forward, batch)


def a_gradient_penalty_inside_no_sync(rank: int, zero_stage: ZeroStage) -> None:
    def backward(model: OddModel, optimizer: Optimizer, batches: list) -> None:
        optimizer.zero_grad(LR)
        penalized(model, batches[0], optimizer.no_sync()).backward()

    (step,) = make_steps(1, 2, 1)
    if zero_stage.shards_parameters:
        with pytest.raises(TrainingError, match=r"create_graph.*sharding gradients"):
            backward(model := OddModel(), build_optimizer(model, zero_stage), step[rank])
        return
    model, oracle = OddModel(), Oracle(Penalized(), zero_stage)
    optimizer = build_optimizer(model, zero_stage)
    backward(model, optimizer, step[rank])
    optimizer.step()
    oracle.take_step(step)
    with optimizer.full_weights():
        assert_same_weights(model, oracle)


def twice_through_one_graph(model: OddModel, optimizer: Optimizer) -> None:
    loss = model(ONES)
    loss.backward(retain_graph=True)
    loss.backward()


def checkpointed_outside_of_the_forward(model: OddModel, optimizer: Optimizer) -> None:
    hidden = model(ONES) * torch.ones(7)
    checkpoint(lambda x: (x * model.gain).sum(), hidden, use_reentrant=True).backward()


def sparse(model: OddModel, optimizer: Optimizer) -> None:
    embedding = torch.nn.Embedding(10, 4, sparse=True)
    another_optimizer(embedding, optimizer).zero_grad(LR)
    embedding(torch.arange(3)).sum().backward()


def taken_by_a_hook(model: OddModel, optimizer: Optimizer) -> None:
    other = OddModel()
    other.gain.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    accumulate(other, another_optimizer(other, optimizer), [ONES])


def another_optimizer(model: torch.nn.Module, optimizer: Optimizer) -> Optimizer:
    return build_optimizer(model, optimizer.grad_buffer.buckets[0].buffer_group.stage)


Misuse = Callable[[OddModel, Optimizer], object]
WITHOUT_FORWARD = r"first.\w+: a gradient without a forward.*call the model"
MISUSES: dict[str, tuple[Misuse, str]] = {
    "two backwards of a graph": (twice_through_one_graph, "no_sync"),
    "a gradient penalty": (
        lambda m, _: penalized(m, ONES.clone()).backward(), r"autograd\.grad.*no_sync|create_graph",
    ),
    "a reentrant checkpoint": (checkpointed_outside_of_the_forward, "use_reentrant=False|full_weights"),
    "no no_sync": (lambda m, _: [m(ONES).backward() for _ in range(2)], "no_sync"),
    "no forward": (lambda m, _: m.first(ONES).sum().backward(), WITHOUT_FORWARD),
    "no second forward": (
        lambda m, o: [accumulate(m, o, [ONES]), m.first(ONES).sum().backward()], WITHOUT_FORWARD,
    ),
    "between two steps": (
        lambda m, o: [take_step(m, o, [ONES]), m(ONES).backward()], "call `zero_grad` between steps",
    ),
    "no zero_grad": (lambda m, o: [take_step(m, o, [ONES]), o.step()], r"zero_grad\(lr\)"),
    "sparse gradients": (sparse, r"weight.*sparse=False"),
    "another hook": (taken_by_a_hook, r"gain.*hook"),
}  # fmt: skip


def what_cannot_be_right(rank: int, zero_stage: ZeroStage) -> None:
    for misuse, message in MISUSES.values():
        model = OddModel()
        optimizer = build_optimizer(model, zero_stage)
        optimizer.zero_grad(LR)
        with pytest.raises(TrainingError, match=message):
            misuse(model, optimizer)


class Quiet(OddModel):
    """Gives no gradient where its input is zero: to an oracle zeros, to the optimizer no graph."""

    has_graph = False

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        loss = super().forward(batch)
        return loss if batch.any() else loss * 0 if self.has_graph else batch.mean()


def quiet_steps(rank: int, zero_stage: ZeroStage, steps: Sequence[Step]) -> None:
    """Train on what a rank is given; for the oracle ranks are filled up with micro-batches of zeros."""
    model, oracle = Quiet(), Oracle(Quiet(), zero_stage)
    oracle.model.has_graph = True
    optimizer = build_optimizer(model, zero_stage, reduce_bucket_size=1)
    for step in steps:
        optimizer.zero_grad(LR)
        for index, batch in enumerate(step[rank]):
            with nullcontext() if index == len(step[rank]) - 1 else optimizer.no_sync():
                loss = model(batch)
                if loss.requires_grad:
                    loss.backward()
        optimizer.finish_grad_sync()
        optimizer.step()
        longest = max(1, *map(len, step))
        oracle.take_step([[*of, *[torch.zeros(4, 23)] * (longest - len(of))] for of in step])
    with optimizer.full_weights():
        assert_same_weights(model, oracle)


def uneven(counts: Sequence[int]) -> list[Step]:
    """Two steps in which rank r has counts[r] micro-batches."""
    return [[rank[:count] for rank, count in zip(step, counts, strict=True)] for step in make_steps(2, 2, 3)]


def ranks_without_backward(rank: int, zero_stage: ZeroStage) -> None:
    quiet_steps(rank, zero_stage, uneven([1, 0]))
    quiet_steps(rank, zero_stage, uneven([0, 0]))


def a_last_micro_batch_without_gradient(rank: int, zero_stage: ZeroStage) -> None:
    for silent in ([False, True], [True, True]):
        (step,) = make_steps(1, 2, 2)
        for of_rank, is_silent in zip(step, silent, strict=True):
            if is_silent:
                of_rank[-1] = torch.zeros(4, 23)
        quiet_steps(rank, zero_stage, [step, *make_steps(1, 2, 2)])


class Branches(torch.nn.Module):
    """A trunk and two branches; a batch (x, name) uses one branch, or none of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.trunk = torch.nn.Linear(23, 11)
        self.branches = torch.nn.ModuleDict({name: torch.nn.Linear(11, 3) for name in ("left", "right")})

    def forward(self, batch: tuple[torch.Tensor, str]) -> torch.Tensor:
        hidden = torch.tanh(self.trunk(batch[0]))
        return (self.branches[batch[1]](hidden) if batch[1] else hidden).square().mean()


def branching(names: list[list[str]], seed: int = 1) -> list[Step]:
    """Three steps in which micro-batch m of rank r uses branch names[r][m]."""
    return [
        [list(zip(*of_rank, strict=True)) for of_rank in zip(step, names, strict=True)]
        for step in make_steps(3, len(names), len(names[0]), seed)
    ]


UNUSED = [
    [["left"], ["left"]], [["left"], ["right"]], [["", ""], ["right", "left"]],
    [["left", "right", ""], ["left", "", "right"]],
]  # fmt: skip
"""Branches of each rank's micro-batches: what is unused is so everywhere, or differs by rank or in time."""


def unused_parameters(rank: int, zero_stage: ZeroStage) -> None:
    for names, bucket_size in product(UNUSED, (1, 150)):
        check_training(rank, zero_stage, Branches, branching(names), reduce_bucket_size=bucket_size)


def unused_parameters_of_interleaved_stages(rank: int, zero_stage: ZeroStage) -> None:
    """Rank 0 fills all buckets of a stage at once, rank 1 leaves some to its end. The last stage is first."""
    names = [["left", "right"], ["", "left"]]
    for bucket_size in (1, 150):
        stages, oracles = [Branches(), Branches()], [Oracle(Branches(), zero_stage, 0.0) for _ in range(2)]
        optimizer = build_optimizer(stages, zero_stage, clip_grad=0.0, reduce_bucket_size=bucket_size)
        for steps in zip(branching(names), branching(names, 2), strict=True):
            optimizer.zero_grad(LR)
            for index, stage in product(range(2), (1, 0)):
                with nullcontext() if index else optimizer.no_sync():
                    stages[stage](steps[stage][rank][index]).backward()
            optimizer.step()
            for oracle, step in zip(oracles, steps, strict=True):
                oracle.take_step(step)
        with optimizer.full_weights():
            for stage, oracle in zip(stages, oracles, strict=True):
                assert_same_weights(stage, oracle)


def a_context_of_an_evaluation_that_ends_within_a_later_step(rank: int, zero_stage: ZeroStage) -> None:
    """Schedules that only run forward enter `no_sync` and never leave it."""

    def backward(model: OddModel, optimizer: Optimizer, batches: list) -> None:
        left_open = [optimizer.no_sync()]
        left_open[0].__enter__()
        optimizer.zero_grad(LR)
        for index, batch in enumerate(batches):
            with optimizer.no_sync() if index < 2 else nullcontext():
                left_open.clear()
                model(batch).backward()

    check_training(rank, zero_stage, OddModel, make_steps(1, 2, 3), backward=backward)


def unequal_numbers_of_micro_batches(rank: int, zero_stage: ZeroStage) -> None:
    for counts in ([2, 1], [3, 1], [0, 3]):
        if not zero_stage.shards_gradients:
            quiet_steps(rank, zero_stage, uneven(counts))
            continue
        with pytest.raises(TrainingError, match=r"1 of 2 ranks.*--data-parallel-sharding optimizer"):
            quiet_steps(rank, zero_stage, uneven(counts))
        new_job()  # the messages of the rank with more micro-batches stay unanswered


def gradients_with_a_graph(rank: int, zero_stage: ZeroStage) -> None:
    """Backward that keeps a graph of itself leaves none in the buffers."""
    optimizer = build_optimizer(model := OddModel(), zero_stage)
    optimizer.zero_grad(LR)
    is_refused = zero_stage.shards_parameters
    with pytest.raises(TrainingError, match="create_graph") if is_refused else nullcontext():
        model(ONES).backward(create_graph=True)
        optimizer.finish_grad_sync()
        assert not any(bucket.shard.requires_grad for bucket in optimizer.grad_buffer.buckets)


def a_weight_read_between_two_steps(rank: int, zero_stage: ZeroStage) -> None:
    """By one rank alone: where it has a shard only, that is an error."""
    model = OddModel()
    optimizer = build_optimizer(model, zero_stage)
    take_step(model, optimizer, [ONES])
    optimizer.finish_param_sync()
    if rank == 0 and zero_stage.shards_parameters:
        for read in (lambda: model.last.weight.sum(), model.state_dict):
            with pytest.raises(TrainingError, match="full_weights"):
                read()
        assert all(parameter.isnan().all() for parameter in model.parameters())
    elif rank == 0:
        assert model.last.weight.isfinite().all()


CHECKS = [
    a_weight_read_between_two_steps,
    a_weight_in_two_reentrant_checkpoints,
    a_second_gradient_of_a_reduced_bucket,
    a_retained_graph_inside_no_sync,
    a_gradient_penalty_inside_no_sync,
    what_cannot_be_right,
    ranks_without_backward,
    a_last_micro_batch_without_gradient,
    unused_parameters,
    unused_parameters_of_interleaved_stages,
    a_context_of_an_evaluation_that_ends_within_a_later_step,
    gradients_with_a_graph,
    unequal_numbers_of_micro_batches,
]


def run_checks(rank: int, world_size: int) -> dict[tuple[str, ZeroStage], str]:
    return failures_of(
        {(check.__name__, zero): partial(check, rank, zero) for check, zero in product(CHECKS, ZERO_STAGES)}
    )


@pytest.fixture(scope="module")
def failures() -> list[dict[tuple[str, ZeroStage], str]]:
    return run_distributed(run_checks, 2)


@pytest.mark.long
@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_equals_autograd_or_is_an_error_on_all_ranks(failures: list, check: str) -> None:
    for zero_stage in ZERO_STAGES:
        assert [rank[check, zero_stage] for rank in failures] == ["", ""]
