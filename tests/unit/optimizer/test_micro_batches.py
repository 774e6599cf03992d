"""Micro-batches as other programs have them: weights with several gradients, uneven ranks, missing backwards.

What can be right equals autograd on one process to the bit; what cannot is one error on all ranks.
"""

import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from distributed_runner import new_job, run_distributed
from optimizer_runs import (
    LEVELS,
    LR,
    OddModel,
    Oracle,
    Step,
    accumulate,
    assert_same_weights,
    build_optimizer,
    data_parallel_groups,
    make_steps,
    take_step,
)
from torch.utils.checkpoint import checkpoint

from patch.config.schema import OptimizerConfig
from patch.errors import TrainingError
from patch.optimizer import OverlappedDistributedOptimizer

# The oracle adds up what a micro-batch gives first, the optimizer (as torch) every gradient as it comes;
# measured: 1.5e-8, a last bit.
REPEATS_BOUND = 1e-7


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
            hidden = checkpoint(
                lambda x, own=own: torch.tanh(self.shared(torch.tanh(own(x)))),
                hidden,
                use_reentrant=self._use_reentrant,
            )
        return hidden.square().mean()


def train(
    rank: int, level: str, build: Callable[[], torch.nn.Module], num_micro_batches: int, bucket_size: int
) -> None:
    """Three steps of a model and of its oracle."""
    model, oracle = build(), Oracle(build(), level)
    optimizer = build_optimizer(model, level, reduce_bucket_size=bucket_size)
    for step in make_steps(3, 2, num_micro_batches):
        take_step(model, optimizer, step[rank])
        oracle.take_step(step)
    optimizer.wait_for_weights()
    assert_same_weights(model, oracle, atol=REPEATS_BOUND if num_micro_batches > 1 else 0.0)


def a_weight_in_two_reentrant_checkpoints(rank: int, level: str) -> None:
    if level == "gradients":  # it has no memory to wait with: see the error below
        train(rank, level, Shared, 1, 10**9)
        return
    for num_micro_batches in (1, 2):
        for bucket_size in (1, 600, 10**9):
            train(rank, level, Shared, num_micro_batches, bucket_size)


def a_weight_in_two_other_checkpoints(rank: int, level: str) -> None:
    train(rank, level, partial(Shared, use_reentrant=False), 2, 1)


def a_second_gradient_of_a_reduced_bucket(rank: int, level: str) -> None:
    """At level `gradients` in the first step; elsewhere where no step before had two."""
    model = Shared(use_reentrant=level == "gradients")
    optimizer = build_optimizer(model, level, reduce_bucket_size=1)
    if level != "gradients":
        accumulate(model, optimizer, [torch.ones(4, 23)])
        model._use_reentrant = True
    with pytest.raises(TrainingError, match=r"shared.*second gradient.*use_reentrant=False"):
        accumulate(model, optimizer, [torch.ones(4, 23)])


def a_second_backward_of_a_retained_graph(rank: int, level: str) -> None:
    model = OddModel()
    optimizer = build_optimizer(model, level)
    optimizer.start_step(LR)
    loss = model(torch.ones(4, 23))
    optimizer.watch(loss)
    loss.backward(retain_graph=True)
    with pytest.raises(TrainingError, match="no_sync"):
        loss.backward()


def a_retained_graph_inside_no_sync(rank: int, level: str) -> None:
    model, oracle = OddModel(), Oracle(OddModel(), level)
    optimizer = build_optimizer(model, level)
    (step,) = make_steps(1, 2, 1)
    optimizer.start_step(LR)
    loss = model(step[rank][0])
    optimizer.watch(loss)
    with optimizer.no_sync():
        loss.backward(retain_graph=True)
    loss.backward()
    optimizer.finish_gradients()
    optimizer.step(optimizer.gradient_norm())
    oracle.take_step([[of_rank[0], of_rank[0]] for of_rank in step])
    optimizer.wait_for_weights()
    assert_same_weights(model, oracle)


def accumulation_without_no_sync(rank: int, level: str) -> None:
    model = OddModel()
    optimizer = build_optimizer(model, level)
    optimizer.start_step(LR)
    for index in range(2):
        loss = model(torch.ones(4, 23))
        optimizer.watch(loss)
        with pytest.raises(TrainingError, match="no_sync") if index else nullcontext():
            loss.backward()


def a_backward_that_watch_was_not_told_of(rank: int, level: str) -> None:
    model = OddModel()
    optimizer = build_optimizer(model, level)
    optimizer.start_step(LR)
    with pytest.raises(TrainingError, match=r"gain.*watch"):
        model(torch.ones(4, 23)).backward()
    accumulate(model, optimizer, [torch.ones(4, 23)])
    with pytest.raises(TrainingError, match=r"gain.*watch"):
        model(torch.ones(4, 23)).backward()


class Quiet(OddModel):
    """Gives no gradient where its input is zero: to an oracle zeros, to the optimizer no graph."""

    has_graph = False

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        loss = super().forward(batch)
        return loss if batch.any() else loss * 0 if self.has_graph else batch.mean()


def quiet_steps(rank: int, level: str, steps: Sequence[Step]) -> None:
    """Train on what a rank is given; for the oracle ranks are filled up with micro-batches of zeros."""
    model, oracle = Quiet(), Oracle(Quiet(), level)
    oracle.model.has_graph = True
    optimizer = build_optimizer(model, level, reduce_bucket_size=1)
    for step in steps:
        optimizer.start_step(LR)
        for index, batch in enumerate(step[rank]):
            with nullcontext() if index == len(step[rank]) - 1 else optimizer.no_sync():
                loss = model(batch)
                optimizer.watch(loss)
                if loss.requires_grad:
                    loss.backward()
        optimizer.finish_gradients()
        optimizer.step(optimizer.gradient_norm())
        longest = max(1, *map(len, step))
        oracle.take_step([[*of, *[torch.zeros(4, 23)] * (longest - len(of))] for of in step])
    optimizer.wait_for_weights()
    assert_same_weights(model, oracle)


def uneven(counts: Sequence[int]) -> list[Step]:
    """Two steps in which rank r has counts[r] micro-batches."""
    return [
        [of_rank[:count] for of_rank, count in zip(step, counts, strict=True)] for step in make_steps(2, 2, 3)
    ]


def ranks_without_backward(rank: int, level: str) -> None:
    quiet_steps(rank, level, uneven([1, 0]))
    quiet_steps(rank, level, uneven([0, 0]))


def a_last_micro_batch_without_gradient(rank: int, level: str) -> None:
    for silent in ([False, True], [True, True]):
        (step,) = make_steps(1, 2, 2)
        for of_rank, is_silent in zip(step, silent, strict=True):
            if is_silent:
                of_rank[-1] = torch.zeros(4, 23)
        quiet_steps(rank, level, [step, *make_steps(1, 2, 2)])


def stages_without_gradient_on_one_rank(rank: int, level: str) -> None:
    """Two stages take turns; rank 1 has no gradient on the one that comes first."""
    if level == "gradients":  # not known before the end: all ranks must have one
        return
    stages, oracles = [Quiet(), Quiet()], [Oracle(Quiet(), level, clip_grad=0.0) for _ in range(2)]
    config = OptimizerConfig(lr=LR, clip_grad=0.0, reduce_bucket_size=1)
    optimizer = OverlappedDistributedOptimizer(stages, config, level, data_parallel_groups())
    (step,) = make_steps(1, 2, 1)
    quiet = [step[0], [torch.zeros(4, 23)]]
    optimizer.start_step(LR)
    for stage, batches in ((1, quiet), (0, step)):
        loss = stages[stage](batches[rank][0])
        optimizer.watch(loss, stage)
        if loss.requires_grad:
            loss.backward()
    optimizer.finish_gradients()
    optimizer.step(optimizer.gradient_norm())
    optimizer.wait_for_weights()
    for stage, oracle, batches in zip(stages, oracles, (step, quiet), strict=True):
        oracle.model.has_graph = True
        oracle.take_step(batches)
        assert_same_weights(stage, oracle)


def unequal_numbers_of_micro_batches(rank: int, level: str) -> None:
    for counts in ([2, 1], [3, 1], [0, 3]):
        if level != "gradients":
            quiet_steps(rank, level, uneven(counts))
            continue
        with pytest.raises(TrainingError, match=r"1 of 2 ranks.*--data-parallel-sharding optimizer"):
            quiet_steps(rank, level, uneven(counts))
        new_job()  # the messages of the rank with more micro-batches stay unanswered


def gradients_with_a_graph(rank: int, level: str) -> None:
    """Backward that keeps a graph of itself leaves none in the buffers."""
    model = OddModel()
    optimizer = build_optimizer(model, level)
    optimizer.start_step(LR)
    loss = model(torch.ones(4, 23))
    optimizer.watch(loss)
    loss.backward(create_graph=True)
    optimizer.finish_gradients()
    assert not any(bucket.shard.requires_grad for bucket in optimizer.gradients.buckets)


def sparse_gradients(rank: int, level: str) -> None:
    model = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = build_optimizer(model, level)
    with pytest.raises(TrainingError, match=r"weight.*sparse=False"):
        accumulate(torch.nn.Sequential(model, Sum()), optimizer, [torch.arange(3)])


def gradients_that_a_hook_takes(rank: int, level: str) -> None:
    model = OddModel()
    model.gain.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    optimizer = build_optimizer(model, level)
    with pytest.raises(TrainingError, match=r"gain.*hook"):
        accumulate(model, optimizer, [torch.ones(4, 23)])


class Sum(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()


CHECKS = [
    a_weight_in_two_reentrant_checkpoints,
    a_weight_in_two_other_checkpoints,
    a_second_gradient_of_a_reduced_bucket,
    a_second_backward_of_a_retained_graph,
    a_retained_graph_inside_no_sync,
    accumulation_without_no_sync,
    a_backward_that_watch_was_not_told_of,
    ranks_without_backward,
    a_last_micro_batch_without_gradient,
    stages_without_gradient_on_one_rank,
    gradients_with_a_graph,
    sparse_gradients,
    gradients_that_a_hook_takes,
    unequal_numbers_of_micro_batches,
]


def run_checks(rank: int, world_size: int, only: str) -> dict[tuple[str, str], str]:
    """The failure of each check at each level on this rank, or an empty string."""
    found = {}
    for check, level in product(CHECKS, LEVELS):
        if only in check.__name__:
            try:
                check(rank, level)
                found[check.__name__, level] = ""
            except Exception:  # noqa: BLE001 - reported by the check's own test; the others go on
                found[check.__name__, level] = traceback.format_exc()
            dist.barrier()
    return found


@pytest.fixture(scope="module")
def failures() -> list[dict[tuple[str, str], str]]:
    return run_distributed(run_checks, 2, "")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_equals_autograd_or_is_an_error_on_all_ranks(failures: list, check: str, level: str) -> None:
    assert [rank[check, level] for rank in failures] == ["", ""]
