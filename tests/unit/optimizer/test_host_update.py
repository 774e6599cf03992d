"""Chunks on the host, wherever they lie and move, updated beside backward: the bits of the plain order.

The device is simulated: its chunks are updated in NumPy, those on the host in C++.
"""

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from distributed_runner import run_distributed
from optimizer_runs import (
    OddModel,
    RandomPolicy,
    SlowKernel,
    accumulate,
    build_optimizer,
    host_kernel,
    make_steps,
    on_host,
    take_step,
    weights_of,
)

from patch.config.choices import ZeroStage
from patch.memory import UNLIMITED, SimulatedDevice
from patch.optimizer import OverlappedDistributedOptimizer
from patch.optimizer.hybrid_adam import Offload
from patch.optimizer.kernels import UpdateItem, adam_kernel

NUM_STEPS = 20
CLIPPED, SOMETIMES, FREE = 0.01, 0.5, 0.0
"""Without clipping all that was speculated is committed, with it all is updated after backward."""
RUNS = [
    (ZeroStage.NONE, torch.float32, CLIPPED),
    (ZeroStage.NONE, torch.float32, SOMETIMES),
    (ZeroStage.NONE, torch.bfloat16, FREE),
    (ZeroStage.OPTIMIZER, torch.bfloat16, SOMETIMES),
    (ZeroStage.OPTIMIZER, torch.float16, CLIPPED),
    (ZeroStage.GRADIENTS, torch.float32, FREE),
    (ZeroStage.GRADIENTS, torch.bfloat16, CLIPPED),
    (ZeroStage.GRADIENTS, torch.float16, SOMETIMES),
]
RANDOM = "random"
PLACES = [(0.0, 100), (0.3, 100), (0.5, 0), (1.0, 100), (RANDOM, 60)]
"""The fraction on the host, and elements of a chunk, 0 where they are searched; or each rank's chunks move at
random, and the host is late."""


def train(rank: int, run: tuple, place: tuple | None) -> dict[str, Any]:
    """Norms and weights of steps of which some use a part of the model only, some are begun and not taken;
    step 10 begins with loaded weights."""
    zero_stage, dtype, clip_grad = run
    model, offload, policy = OddModel(dtype=dtype), None, RandomPolicy(rank)
    is_random = place is not None and place[0] == RANDOM
    if place is not None:
        offload = Offload(SimulatedDevice(UNLIMITED), policy, place[1]) if is_random else on_host(*place)
    changes = {"clip_grad": clip_grad, "reduce_bucket_size": 200, "initial_loss_scale": 1024.0}
    with host_kernel(SlowKernel(0.0, 0.005)) if is_random else nullcontext():
        optimizer = build_optimizer(model, zero_stage, offload=offload, **changes)
    norms = []
    for index, step in enumerate(make_steps(NUM_STEPS, 2, 2)):
        batches = [batch.to(dtype) for batch in step[rank]]
        model.is_short = index % 3 == 1
        optimizer.apply_placement()
        if index == 10:
            model.load_state_dict(OddModel(seed=7, dtype=dtype).state_dict())
            optimizer.reload_model_params()
        if index % 4 == 3:
            accumulate(model, optimizer, batches)
        else:
            norms.append(take_step(model, optimizer, batches))
    optimizer.finish_param_sync()
    manager = optimizer.adam.manager
    return {
        "norms": norms,
        "weights": weights_of(model),
        "moves": policy.num_moves,
        "fraction": (manager.offload_fraction, manager.size / manager.num_elements),
    }


class Watched:
    """The host's kernel, noting which threads call it and how many elements go to a shadow."""

    def __init__(self) -> None:
        self._kernel = adam_kernel(torch.device("cpu"))
        self.threads: list[str] = []
        self.plain = self.speculated = 0
        self.failure: Exception | None = None

    def update(self, items: Sequence[UpdateItem]) -> None:
        if self.failure is not None:
            raise self.failure
        self.threads.append(threading.current_thread().name)
        self._kernel.update(items)
        for item in items:
            assert item.out is not None
            is_in_place = item.out.exp_avg.data_ptr() == item.states.exp_avg.data_ptr()
            numel = item.grad.numel()
            self.plain, self.speculated = (
                self.plain + numel * is_in_place,
                self.speculated + numel * (not is_in_place),
            )


def watch_kernel(
    fraction: float, clip_grad: float, host_bytes: int = UNLIMITED
) -> tuple[OddModel, OverlappedDistributedOptimizer, Watched]:
    kernel, model, offload = Watched(), OddModel(), on_host(fraction, 100, host_bytes)
    with host_kernel(kernel):
        return model, build_optimizer(model, ZeroStage.NONE, offload=offload, clip_grad=clip_grad), kernel


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
    _, optimizer, _ = watch_kernel(1.0, FREE)
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


def run_alone(rank: int, world_size: int) -> dict[str, Any]:
    return {
        "updates": {clip: count_updates(clip) for clip in (CLIPPED, FREE)},
        "early": count_before_the_last_gradient(),
        "little memory": count_with_little_memory(),
        "failure": fail_in_worker(),
    }


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    return run_distributed(run_alone, 1)[0]


def run_all(rank: int, world_size: int) -> dict[tuple, dict[str, Any]]:
    return {(run, place): train(rank, run, place) for run, place in product(RUNS, [None, *PLACES])}


@pytest.fixture(scope="module")
def ranks() -> list[dict[tuple, dict[str, Any]]]:
    return run_distributed(run_all, 2)


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_placement_changes_no_bit(ranks: list, run: tuple, place: tuple) -> None:
    for found in ranks:
        expected, ours = found[run, None], found[run, place]
        assert ours["norms"] == expected["norms"] and len(ours["norms"]) == NUM_STEPS * 3 // 4
        for name, weight in expected["weights"].items():
            assert np.isfinite(weight).all() and np.array_equal(ours["weights"][name], weight), name
        fraction, of_chunk = ours["fraction"]
        assert ours["moves"] > 20 if place[0] == RANDOM else abs(fraction - place[0]) <= of_chunk


def test_clipping_of_these_runs_is_what_they_say(ranks: list) -> None:
    norms = np.array(ranks[0][RUNS[1], None]["norms"])
    assert (norms > CLIPPED).all() and 0 < (norms > SOMETIMES).sum() < len(norms)


def test_shadows_hold_no_more_than_half_of_the_spare_memory(outcomes: dict[str, Any]) -> None:
    none, *some = outcomes["little memory"]
    assert none == 0 and some == sorted(set(some))
    assert all(100 * (number - 1) < numel <= 100 * number for number, numel in enumerate(some, start=1))


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
