"""Out of memory on some ranks of a job: states leave, all ranks do the work again, and no bit differs."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_runner import new_job, run_distributed
from small_runs import ON_HOST, small_run
from training_runs import build_seeded_run, digests, messages_from

from patch.distributed.collectives import is_on_all_ranks
from patch.memory.simulated_device import SimulatedDevice
from patch.optimizer.buckets.bucket import Bucket
from patch.training.evaluation import evaluate
from patch.training.guards.error_translation import LostRankError
from patch.training.setup import Run
from patch.training.step import train_step

pytestmark = pytest.mark.long

STEPS = 4
SMALL = {
    "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 80, "kv_channels": 8, "max_padding_length": 16,
    "seq_length": 16, "micro_batch_size": 1, "reduce_bucket_size": 9000, "precision": "bf16",
    "optimizer_offload_chunk_size": 1999, "train_iters": STEPS, "optimizer_offload_policy": "static",
    "optimizer_offload_fraction": 0.3, "simulated_device_memory": 10**12,
}  # fmt: skip
CASES = [
    ("none", 2, "first forward"),
    ("optimizer", 2, "last forward"),
    ("gradients", 2, "backward"),
    ("gradients", 2, "hook"),
    ("none", 2, "full device"),
    ("optimizer", 2, "hook"),
    ("gradients", 2, "evaluation"),
    ("parameters", 2, "first forward"),
    ("gradients", 1, "backward"),
    ("optimizer", 2, "full device"),
    ("parameters", 2, "hook"),
    ("on host", 2, "full device"),
]
"""Sharding, micro-batches, and where memory runs out: `hook` is where a gradient is put in its bucket, with a
part of them reduced. On rank 0, on rank 1 or on both."""


def build(level: str, num_batches: int, **changes: Any) -> Run:
    dp = dist.get_world_size()
    layout = {"dp": dp, "data_parallel_sharding": level, "global_batch_size": dp * num_batches}
    layout |= {"param_persistence_threshold": 100} if level == "parameters" else {}
    if level == "on host":
        layout |= ON_HOST | {"optimizer_offload_fraction": 0.3, "cpu_offloading_weights_fraction": 0.3}
    activations = {"cpu_offloading": level != "none"}
    return build_seeded_run(small_run(**SMALL | layout | activations | changes))


def device_of(run: Run) -> SimulatedDevice:
    device = run.optimizer.placement.device
    assert isinstance(device, SimulatedDevice)
    return device


class Fault:
    """Asks the device for more than there is, once, when it is armed and its turn has come."""

    def __init__(self, run: Run, place: str) -> None:
        self.device, self.place, self.is_armed, self.turns = device_of(run), place, False, 0
        batches = run.config.num_micro_batches
        self.after = {"last forward": batches, "backward": batches, "hook": 6}.get(place, 1)
        self.provide_buffer = run.optimizer.schedule._provide_buffer
        run.stages[0].register_forward_hook(self.on_forward)
        if place == "hook":
            run.optimizer.schedule._provide_buffer = self.on_bucket
        if place == "backward":
            weight = run.stages[0].decoder.layers[0].mlp.linear_fc1.weight
            weight.register_hook(lambda gradient: self.strike())

    def on_forward(self, *arguments: Any) -> None:
        torch.rand(3)  # as dropout would
        if self.place == "full device" and self.is_armed:  # another process takes what is left, and a byte
            self.is_armed = False
            self.device.budget = self.device.allocated_bytes - 1
        elif self.place in ("first forward", "last forward", "evaluation"):
            self.strike()

    def on_bucket(self, bucket: Bucket) -> None:
        self.strike()
        self.provide_buffer(bucket)

    def strike(self) -> None:
        self.turns += self.is_armed
        if self.is_armed and self.turns == self.after:
            self.is_armed = False
            self.device.reserve(10**15)


def trained(case: tuple[str, int, str], short: bool) -> dict[str, Any]:
    """Four steps and an evaluation; in the third step, or in the evaluation, this rank may be `short`."""
    level, num_batches, place = case
    run = build(level, num_batches)
    fault = Fault(run, place)
    found: list[Any] = []
    for iteration in range(STEPS):
        fault.is_armed = short and iteration == 2 and place != "evaluation"
        result = train_step(run, iteration)
        found.append((result.loss, result.grad_norm))
    fault.is_armed = short and place == "evaluation"
    found += [evaluate(run)["valid_loss"], digests(run), torch.get_rng_state().tolist()]
    fraction = run.optimizer.adam.manager.offload_fraction
    new_job()
    return {"bits": found, "fraction": fraction}


def hopeless(rank: int, changes: dict[str, Any]) -> str:
    """Memory runs out on rank 1, which has no states that could leave; what each rank raises."""
    run = build("gradients", 1, **changes)
    fault = Fault(run, "backward")
    fault.is_armed = rank == 1
    expected = torch.OutOfMemoryError if rank == 1 else LostRankError
    with pytest.raises(expected) as caught:
        train_step(run, 0)
    assert is_on_all_ranks(caught.value), "so a checkpoint that is being written can be completed"
    return str(caught.value)


def collective_without_memory() -> float:
    """NCCL has no memory for a collective: the other ranks' part of it would have no counterpart."""
    run = build("gradients", 1)

    def fail(*arguments: Any) -> None:
        raise dist.DistBackendError("NCCL error: ncclUnhandledCudaError, Failed to CUDA calloc 608 bytes")

    run.stages[0].register_forward_hook(fail)
    with pytest.raises(dist.DistBackendError):
        train_step(run, 0)
    fraction = run.optimizer.adam.manager.offload_fraction
    new_job()
    return fraction


def part_of_a_model() -> float:
    """The other ranks wait for activations, so nothing moves and the error ends the run."""
    layout = {"tp": 2, "global_batch_size": 1, "optimizer_offload_fraction": 0.0}
    run = build_seeded_run(small_run(**SMALL | layout))
    device_of(run).budget = device_of(run).allocated_bytes
    with pytest.raises(torch.OutOfMemoryError, match="--simulated-device-memory"):
        train_step(run, 0)
    return run.optimizer.report().offload_fraction


def run_together(rank: int, world_size: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for index, case in enumerate(CASES):
        if case[:2] not in found:
            found[case[:2]] = trained(case, short=False)
        found[case] = trained(case, short=index % 3 in (rank, 2))
    found["collective"] = collective_without_memory()
    found["hopeless"] = hopeless(rank, {"optimizer_offload_fraction": 1.0})
    new_job()
    found["part"] = part_of_a_model()
    return found


def run_alone(rank: int, world_size: int) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """A step that is disturbed and one that is not, and what both log."""
    said = messages_from("INFO")
    case = ("none", 2, "full device")
    found = trained(case, short=False), trained(case, short=True)
    return *found, [line for line in said if "offload" in line or "again" in line]


@functools.cache
def together() -> list[dict[Any, Any]]:
    return run_distributed(run_together, 2, timeout_s=280)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_what_ran_out_of_memory_is_done_again_to_the_same_bits(case: tuple[str, int, str]) -> None:
    for rank, found in enumerate(together()):
        undisturbed, short = found[case[:2]], found[case]
        assert short["bits"] == undisturbed["bits"]
        was_short = CASES.index(case) % 3 in (rank, 2)
        assert (short["fraction"] > undisturbed["fraction"]) == was_short, "the states of a short rank leave"


def test_a_process_alone_does_its_step_again_and_says_where_states_are() -> None:
    ((undisturbed, short, said),) = run_distributed(run_alone, 1)
    assert short["bits"] == undisturbed["bits"] and short["fraction"] > undisturbed["fraction"]
    first, second, moved, again = said
    assert first == second and first.startswith("optimizer offload: static, ")
    assert first.endswith(f"offload fraction {undisturbed['fraction']:.3f}")
    assert moved.startswith("step 3 ran out of memory (") and "To avoid it: " in moved
    assert again == "step 3 is done again: 1 rank ran out of memory"


def test_all_ranks_end_where_one_has_nothing_left_to_move() -> None:
    other, short = (found["hopeless"] for found in together())
    assert "another rank ran out of memory" in other and "--simulated-device-memory" in short


def test_a_collective_that_failed_itself_is_not_tried_again() -> None:
    assert [found["collective"] for found in together()] == pytest.approx([0.3, 0.3], abs=0.05)


def test_parts_of_a_model_do_not_try_again() -> None:
    """error_translation.py makes exit code 5 of it, and the launcher says what to change."""
    assert [found["part"] for found in together()] == [0.0, 0.0]
