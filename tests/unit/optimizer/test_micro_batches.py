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
    LR,
    ZERO_STAGES,
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

from patch.config.choices import ZeroStage
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
    rank: int,
    zero_stage: ZeroStage,
    build: Callable[[], torch.nn.Module],
    num_micro_batches: int,
    bucket_size: int,
) -> None:
    """Three steps of a model and of its oracle."""
    model, oracle = build(), Oracle(build(), zero_stage)
    optimizer = build_optimizer(model, zero_stage, reduce_bucket_size=bucket_size)
    for step in make_steps(3, 2, num_micro_batches):
        take_step(model, optimizer, step[rank])
        oracle.take_step(step)
    optimizer.finish_param_sync()
    assert_same_weights(model, oracle, atol=REPEATS_BOUND if num_micro_batches > 1 else 0.0)


def a_weight_in_two_reentrant_checkpoints(rank: int, zero_stage: ZeroStage) -> None:
    if zero_stage is ZeroStage.GRADIENTS:  # it has no memory to wait with: see the error below
        train(rank, zero_stage, Shared, 1, 10**9)
        return
    for num_micro_batches in (1, 2):
        for bucket_size in (1, 600, 10**9):
            train(rank, zero_stage, Shared, num_micro_batches, bucket_size)


def a_weight_in_two_other_checkpoints(rank: int, zero_stage: ZeroStage) -> None:
    train(rank, zero_stage, partial(Shared, use_reentrant=False), 2, 1)


def a_second_gradient_of_a_reduced_bucket(rank: int, zero_stage: ZeroStage) -> None:
    """At ZeRO stage `gradients` in any micro-batch; elsewhere where no step before had two."""
    is_sharded = zero_stage is ZeroStage.GRADIENTS
    for num_micro_batches, is_fused in product((1, 2) if is_sharded else (1,), (False, True)):
        model = Shared(use_reentrant=is_sharded)
        optimizer = build_optimizer(
            model, zero_stage, reduce_bucket_size=1, gradient_accumulation_fusion=is_fused
        )
        if not is_sharded:
            accumulate(model, optimizer, [torch.ones(4, 23)])
            model._use_reentrant = True
        with pytest.raises(TrainingError, match=r"shared.*second gradient.*use_reentrant=False"):
            accumulate(model, optimizer, [torch.ones(4, 23)] * num_micro_batches)


def a_second_backward_of_a_retained_graph(rank: int, zero_stage: ZeroStage) -> None:
    model = OddModel()
    optimizer = build_optimizer(model, zero_stage)
    optimizer.zero_grad(LR)
    loss = model(torch.ones(4, 23))
    loss.backward(retain_graph=True)
    with pytest.raises(TrainingError, match="no_sync"):
        loss.backward()


def a_retained_graph_inside_no_sync(rank: int, zero_stage: ZeroStage) -> None:
    model, oracle = OddModel(), Oracle(OddModel(), zero_stage)
    optimizer = build_optimizer(model, zero_stage)
    (step,) = make_steps(1, 2, 1)
    optimizer.zero_grad(LR)
    loss = model(step[rank][0])
    with optimizer.no_sync():
        loss.backward(retain_graph=True)
    loss.backward()
    optimizer.finish_grad_sync()
    optimizer.step()
    oracle.take_step([[of_rank[0], of_rank[0]] for of_rank in step])
    optimizer.finish_param_sync()
    assert_same_weights(model, oracle)


def a_gradient_penalty(rank: int, zero_stage: ZeroStage) -> None:
    """`torch.autograd.grad` through the model is a backward: inside `no_sync`, or an error that says so."""

    def penalty(loss: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(loss, batch, create_graph=True)[0].square().sum()

    class Penalized(OddModel):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            loss = super().forward(batch.requires_grad_())
            return loss + penalty(loss, batch)

    model, oracle = OddModel(), Oracle(Penalized(), zero_stage)
    optimizer = build_optimizer(model, zero_stage)
    (step,) = make_steps(1, 2, 1)
    oracle.take_step(step)
    batch = step[rank][0].requires_grad_()
    for context in (nullcontext(), optimizer.no_sync()):
        optimizer.zero_grad(LR)
        loss = model(batch)
        with context:
            loss = loss + penalty(loss, batch)
        is_wrong = isinstance(context, nullcontext)
        with pytest.raises(TrainingError, match=r"autograd\.grad.*no_sync") if is_wrong else nullcontext():
            loss.backward()
    optimizer.step()
    optimizer.finish_param_sync()
    assert_same_weights(model, oracle)


def a_reentrant_checkpoint_outside_of_the_forward(rank: int, zero_stage: ZeroStage) -> None:
    model = OddModel()
    optimizer = build_optimizer(model, zero_stage)
    optimizer.zero_grad(LR)
    hidden = model(torch.ones(4, 23)) * torch.ones(7)
    loss = checkpoint(lambda x: (x * model.gain).sum(), hidden, use_reentrant=True)
    with pytest.raises(TrainingError, match="use_reentrant=False"):
        loss.backward()


def accumulation_without_no_sync(rank: int, zero_stage: ZeroStage) -> None:
    model = OddModel()
    optimizer = build_optimizer(model, zero_stage)
    optimizer.zero_grad(LR)
    for index in range(2):
        loss = model(torch.ones(4, 23))
        with pytest.raises(TrainingError, match="no_sync") if index else nullcontext():
            loss.backward()


def a_backward_without_a_forward_of_the_model(rank: int, zero_stage: ZeroStage) -> None:
    model = OddModel()
    optimizer = build_optimizer(model, zero_stage)
    optimizer.zero_grad(LR)
    with pytest.raises(TrainingError, match=r"first.\w+: a gradient without a forward.*call the model"):
        model.first(torch.ones(4, 23)).sum().backward()
    accumulate(model, optimizer, [torch.ones(4, 23)])
    with pytest.raises(TrainingError, match=r"first.\w+: a gradient without a forward.*call the model"):
        model.first(torch.ones(4, 23)).sum().backward()


def a_backward_between_two_steps(rank: int, zero_stage: ZeroStage) -> None:
    model = OddModel()
    optimizer = build_optimizer(model, zero_stage)
    take_step(model, optimizer, [torch.ones(4, 23)])
    with pytest.raises(TrainingError, match="between steps call `zero_grad`"):
        model(torch.ones(4, 23)).backward()


def a_step_without_zero_grad(rank: int, zero_stage: ZeroStage) -> None:
    model = OddModel()
    optimizer = build_optimizer(model, zero_stage)
    with pytest.raises(TrainingError, match=r"zero_grad\(lr\)"):
        optimizer.step()
    take_step(model, optimizer, [torch.ones(4, 23)])
    with pytest.raises(TrainingError, match=r"zero_grad\(lr\)"):
        optimizer.step()


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
    optimizer.finish_param_sync()
    assert_same_weights(model, oracle)


def uneven(counts: Sequence[int]) -> list[Step]:
    """Two steps in which rank r has counts[r] micro-batches."""
    return [
        [of_rank[:count] for of_rank, count in zip(step, counts, strict=True)] for step in make_steps(2, 2, 3)
    ]


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


def stages_without_gradient_on_one_rank(rank: int, zero_stage: ZeroStage) -> None:
    """Two stages take turns; rank 1 has no gradient on the one that comes first."""
    if zero_stage is ZeroStage.GRADIENTS:  # not known before the end: all ranks must have one
        return
    stages, oracles = [Quiet(), Quiet()], [Oracle(Quiet(), zero_stage, clip_grad=0.0) for _ in range(2)]
    config = OptimizerConfig(lr=LR, clip_grad=0.0, reduce_bucket_size=1)
    optimizer = OverlappedDistributedOptimizer(stages, config, zero_stage, data_parallel_groups())
    (step,) = make_steps(1, 2, 1)
    quiet = [step[0], [torch.zeros(4, 23)]]
    optimizer.zero_grad(LR)
    for stage, batches in ((1, quiet), (0, step)):
        loss = stages[stage](batches[rank][0])
        if loss.requires_grad:
            loss.backward()
    optimizer.finish_grad_sync()
    optimizer.step()
    optimizer.finish_param_sync()
    for stage, oracle, batches in zip(stages, oracles, (step, quiet), strict=True):
        oracle.model.has_graph = True
        oracle.take_step(batches)
        assert_same_weights(stage, oracle)


def unequal_numbers_of_micro_batches(rank: int, zero_stage: ZeroStage) -> None:
    for counts in ([2, 1], [3, 1], [0, 3]):
        if zero_stage is not ZeroStage.GRADIENTS:
            quiet_steps(rank, zero_stage, uneven(counts))
            continue
        with pytest.raises(TrainingError, match=r"1 of 2 ranks.*--data-parallel-sharding optimizer"):
            quiet_steps(rank, zero_stage, uneven(counts))
        new_job()  # the messages of the rank with more micro-batches stay unanswered


def gradients_with_a_graph(rank: int, zero_stage: ZeroStage) -> None:
    """Backward that keeps a graph of itself leaves none in the buffers."""
    model = OddModel()
    optimizer = build_optimizer(model, zero_stage)
    optimizer.zero_grad(LR)
    loss = model(torch.ones(4, 23))
    loss.backward(create_graph=True)
    optimizer.finish_grad_sync()
    assert not any(bucket.shard.requires_grad for bucket in optimizer.grad_buffer.buckets)


def sparse_gradients(rank: int, zero_stage: ZeroStage) -> None:
    model = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = build_optimizer(model, zero_stage)
    with pytest.raises(TrainingError, match=r"weight.*sparse=False"):
        accumulate(torch.nn.Sequential(model, Sum()), optimizer, [torch.arange(3)])


def gradients_that_a_hook_takes(rank: int, zero_stage: ZeroStage) -> None:
    model = OddModel()
    model.gain.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    optimizer = build_optimizer(model, zero_stage)
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
    a_gradient_penalty,
    a_reentrant_checkpoint_outside_of_the_forward,
    accumulation_without_no_sync,
    a_backward_without_a_forward_of_the_model,
    a_backward_between_two_steps,
    a_step_without_zero_grad,
    ranks_without_backward,
    a_last_micro_batch_without_gradient,
    stages_without_gradient_on_one_rank,
    gradients_with_a_graph,
    sparse_gradients,
    gradients_that_a_hook_takes,
    unequal_numbers_of_micro_batches,
]


def run_checks(rank: int, world_size: int, only: str) -> dict[tuple[str, str], str]:
    """The failure of each check at each ZeRO stage on this rank, or an empty string."""
    found = {}
    for check, zero_stage in product(CHECKS, ZERO_STAGES):
        if only in check.__name__:
            try:
                check(rank, zero_stage)
                found[check.__name__, zero_stage] = ""
            except Exception:  # noqa: BLE001 - reported by the check's own test; the others go on
                found[check.__name__, zero_stage] = traceback.format_exc()
            dist.barrier()
    return found


@pytest.fixture(scope="module")
def failures() -> list[dict[tuple[str, str], str]]:
    return run_distributed(run_checks, 2, "")


@pytest.mark.parametrize("zero_stage", ZERO_STAGES)
@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_equals_autograd_or_is_an_error_on_all_ranks(
    failures: list, check: str, zero_stage: ZeroStage
) -> None:
    assert [rank[check, zero_stage] for rank in failures] == ["", ""]
