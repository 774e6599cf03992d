"""Chunks on the host, updated beside backward: the bits of the plain order, on another kernel.

The device is simulated: its chunks are updated in NumPy, those on the host in C++.
"""

import threading
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from distributed_runner import run_distributed
from optimizer_runs import LR, OddModel, accumulate, data_parallel_groups, make_steps, take_step, weights_of

from patch.config.choices import ZeroStage
from patch.config.schema import OptimizerConfig
from patch.memory import UNLIMITED, SimulatedDevice
from patch.optimizer import OverlappedDistributedOptimizer, host_update
from patch.optimizer.hybrid_adam import Offload
from patch.optimizer.kernels import AdamScalars, Segment, adam_kernel
from patch.optimizer.placement import StaticPlacementPolicy

NUM_STEPS = 30
CLIPPED, SOMETIMES, FREE = 0.01, 0.3, 0.0
CHUNK, SEARCHED = 100, 0
CASES = [
    *product((torch.float32, torch.bfloat16), (CLIPPED, SOMETIMES, FREE), (0.0, 0.3, 0.5, 1.0), (CHUNK,)),
    (torch.bfloat16, SOMETIMES, 0.5, SEARCHED),
]


def build(
    dtype: torch.dtype,
    clip_grad: float,
    fraction: float | None,
    chunk_size: int = 0,
    host_bytes: int = UNLIMITED,
) -> tuple[OddModel, OverlappedDistributedOptimizer]:
    model = OddModel(dtype=dtype)
    config = OptimizerConfig(lr=LR, clip_grad=clip_grad, reduce_bucket_size=300)
    offload = None
    if fraction is not None:
        policy = StaticPlacementPolicy(fraction)
        offload = Offload(SimulatedDevice(1 << 40), policy, chunk_size, host_bytes)
    return model, OverlappedDistributedOptimizer(
        [model], config, ZeroStage.NONE, data_parallel_groups(), offload
    )


def batches_of(step: Sequence, dtype: torch.dtype) -> list[torch.Tensor]:
    return [batch.to(dtype) for batch in step[0]]


def train(
    dtype: torch.dtype, clip_grad: float, fraction: float | None, chunk_size: int = 0
) -> dict[str, Any]:
    model, optimizer = build(dtype, clip_grad, fraction, chunk_size)
    norms = [take_step(model, optimizer, batches_of(step, dtype)) for step in make_steps(NUM_STEPS, 1, 2)]
    optimizer.finish_param_sync()
    return {
        "norms": norms,
        "weights": weights_of(model.float()),
        "fraction": optimizer.adam.manager.offload_fraction,
    }


class Watched:
    """The host's kernel, noting which threads call it and how many elements go to a shadow."""

    def __init__(self) -> None:
        self._kernel = adam_kernel(torch.device("cpu"))
        self.threads: list[str] = []
        self.plain = self.speculated = 0
        self.failure: Exception | None = None

    def update(self, segments: Sequence[Segment], scalars: AdamScalars) -> None:
        if self.failure is not None:
            raise self.failure
        self.threads.append(threading.current_thread().name)
        self._kernel.update(segments, scalars)
        for segment in segments:
            assert segment.shadow is not None
            is_in_place = segment.shadow.exp_avg.data_ptr() == segment.states.exp_avg.data_ptr()
            numel = segment.grad.numel()
            self.plain, self.speculated = (
                self.plain + numel * is_in_place,
                self.speculated + numel * (not is_in_place),
            )


def watch_kernel(
    fraction: float, clip_grad: float, host_bytes: int = UNLIMITED
) -> tuple[OddModel, OverlappedDistributedOptimizer, Watched]:
    kernel, original = Watched(), host_update.adam_kernel
    host_update.adam_kernel = lambda device: kernel  # type: ignore[assignment]
    try:
        return *build(torch.float32, clip_grad, fraction, 100, host_bytes), kernel
    finally:
        host_update.adam_kernel = original


def await_worker(optimizer: OverlappedDistributedOptimizer) -> None:
    """Until all is done that it was given."""
    assert optimizer.adam.host_updates is not None
    optimizer.adam.host_updates._worker.submit(lambda: None).result()


def count_updates(clip_grad: float) -> list[tuple[int, int]]:
    """Elements updated in place and speculatively, step by step."""
    model, optimizer, kernel = watch_kernel(1.0, clip_grad)
    counts = []
    for step in make_steps(12, 1, 1):
        kernel.plain = kernel.speculated = 0
        accumulate(model, optimizer, step[0])
        await_worker(optimizer)
        optimizer.step()
        optimizer.finish_param_sync()
        counts.append((kernel.plain, kernel.speculated))
    assert {name.split("_")[0] for name in kernel.threads} == {"host-adam"}
    return counts


def count_before_the_last_gradient() -> int:
    """Elements updated while the first layer's gradient is still missing."""
    model, optimizer, kernel = watch_kernel(1.0, FREE)
    seen = []

    def on_last_gradient(gradient: torch.Tensor) -> None:
        await_worker(optimizer)
        seen.append(kernel.speculated)

    model.first.weight.register_hook(on_last_gradient)
    take_step(model, optimizer, make_steps(1, 1, 1)[0][0])
    return seen[0]


def count_with_little_memory() -> list[int]:
    """Elements speculated in a step, where there is memory for so many shadows of 100 fp32 elements."""
    _, optimizer = build(torch.float32, FREE, 1.0, 100)
    states = 8 * 100 * len(optimizer.adam.manager.chunks)
    found = []
    for num_shadows in range(4):
        model, optimizer, kernel = watch_kernel(1.0, FREE, host_bytes=states + 2 * num_shadows * 12 * 100)
        accumulate(model, optimizer, make_steps(1, 1, 1)[0][0])
        await_worker(optimizer)
        found.append(kernel.speculated)
    return found


def fail_in_worker() -> str:
    model, optimizer, kernel = watch_kernel(0.5, FREE)
    steps = make_steps(2, 1, 1)
    take_step(model, optimizer, steps[0][0])
    kernel.failure = RuntimeError("a worker's own trouble")
    try:
        take_step(model, optimizer, steps[1][0])
        optimizer.finish_param_sync()
    except RuntimeError as error:
        return str(error)
    return ""


def skip_a_step() -> bool:
    """A step that is begun and not taken leaves no trace."""
    outcomes = []
    for is_interrupted in (False, True):
        model, optimizer = build(torch.bfloat16, FREE, 1.0, 100)
        for index, step in enumerate(make_steps(4, 1, 1)):
            if is_interrupted and index == 2:
                accumulate(model, optimizer, batches_of(make_steps(1, 1, 1, seed=9)[0], torch.bfloat16))
            take_step(model, optimizer, batches_of(step, torch.bfloat16))
        optimizer.finish_param_sync()
        outcomes.append(weights_of(model.float()))
    return all(np.array_equal(outcomes[0][name], outcomes[1][name]) for name in outcomes[0])


def run_all(rank: int, world_size: int) -> dict[str, Any]:
    return {
        "resident": {
            (dtype, clip): train(dtype, clip, None)
            for dtype, clip in dict.fromkeys(case[:2] for case in CASES)
        },
        "offloaded": {case: train(*case) for case in CASES},
        "updates": {clip: count_updates(clip) for clip in (CLIPPED, FREE)},
        "early": count_before_the_last_gradient(),
        "little memory": count_with_little_memory(),
        "failure": fail_in_worker(),
        "skipped": skip_a_step(),
    }


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    return run_distributed(run_all, 1)[0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_placement_changes_no_bit(outcomes: dict[str, Any], case: tuple) -> None:
    expected, ours = outcomes["resident"][case[:2]], outcomes["offloaded"][case]
    assert ours["norms"] == expected["norms"]
    for name, weight in expected["weights"].items():
        assert np.array_equal(ours["weights"][name], weight), name
    assert abs(ours["fraction"] - case[2]) <= (case[3] or 16) / 975


def test_shadows_hold_no_more_than_half_of_the_spare_memory(outcomes: dict[str, Any]) -> None:
    none, *some = outcomes["little memory"]
    assert none == 0 and some == sorted(set(some))
    assert all(100 * (number - 1) < numel <= 100 * number for number, numel in enumerate(some, start=1))


def test_clipping_of_these_runs_is_what_the_cases_say(outcomes: dict[str, Any]) -> None:
    norms = np.array(outcomes["resident"][torch.float32, SOMETIMES]["norms"])
    assert (norms > CLIPPED).all() and 0 < (norms > SOMETIMES).sum() < NUM_STEPS


def test_no_overlap(outcomes: dict[str, Any]) -> None:
    """The original copies, updates and copies back after backward, one after the other."""
    assert outcomes["early"] >= 200


def test_speculation_is_bounded_and_saves_the_second_update(outcomes: dict[str, Any]) -> None:
    for plain, speculated in outcomes["updates"][FREE]:
        assert plain + speculated == 975 and 0 < speculated <= 975 / 2


def test_speculation_pauses_when_clipping_is_frequent(outcomes: dict[str, Any]) -> None:
    counts = outcomes["updates"][CLIPPED]
    assert counts[0][0] == 975 and counts[0][1] > 0  # done twice
    assert counts[-1] == (975, 0)


def test_an_error_in_the_worker_reaches_training(outcomes: dict[str, Any]) -> None:
    assert outcomes["failure"] == "a worker's own trouble"


def test_a_step_not_taken_leaves_no_trace(outcomes: dict[str, Any]) -> None:
    assert outcomes["skipped"]
