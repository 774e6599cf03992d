"""Ranks over NCCL on all GPUs: every level, layout and placement learns alike.

On one GPU two share it, which NCCL 2.30 can: LD_PRELOAD its libnccl.so.2 where torch brings an older one.
"""

from collections.abc import Callable

import pytest
import torch
from gpu.nccl_ranks import (
    LAYOUTS,
    LEVELS,
    NUM_RANKS,
    OTHERS,
    RESUMED,
    STEPS,
    Found,
    is_possible,
    run_ranks,
)

FP8_BOUND = 0.05
"""On losses near 5.6 over five steps; tensor parallelism scales and sums other parts."""
PLACED = {f"{level}, half on the host": f"{level}, on the device" for level in LEVELS} | {
    "tensor, no SP, half on the host": "tensor, no SP", "40 steps, half on the host": "40 steps",
    "parameters, in host memory": "parameters, on the device",
    "gradients, on a disk": "gradients, on the device",
    "tensor, in host memory": "tensor", "interleaved, in host memory": "interleaved",
    "16 bits, in host memory": "16 bits, in shards",
    "moments, on a disk": "moments", "moments, sharded, half on the host": "moments",
}  # fmt: skip
"""Where states and weights lie: beside the same run with all of them on the GPUs."""


pytestmark = pytest.mark.skipif(not is_possible(), reason="needs two CUDA devices, or one and NCCL 2.30")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, figure: Callable[[str, object], None]) -> Found:
    found = run_ranks(NUM_RANKS, tmp_path_factory.mktemp("nccl"), "gpu.nccl_ranks:all_layouts", 280)
    figure(f"seconds of each part, {NUM_RANKS} ranks", found.seconds)
    return found


@pytest.mark.parametrize("name", PLACED)
def test_placement_changes_no_bit(found: Found, name: str) -> None:
    *losses, digest = found[PLACED[name]]
    assert len(set(losses)) == len(losses)
    assert found[name] == [*losses, digest]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_no_process_holds_memory_of_anothers_gpu_after_a_save_in_the_background(found: Found) -> None:
    assert found["other contexts"] == [[]] * NUM_RANKS


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_learn_alike(found: Found, name: str) -> None:
    expected = found["none, on the device"][:STEPS]
    assert len(set(expected)) == STEPS
    assert found[name][:STEPS] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", [name for name in OTHERS if "," in name])
def test_packing_windows_16_and_8_bits_learn_alike_in_every_layout(found: Found, name: str) -> None:
    expected = found[name.split(",")[0]][:STEPS]
    precision = OTHERS[name].get("precision", "fp32")
    bound = {"fp32": {"rel": 1e-4}, "bf16": {"rel": 5e-3}, "fp8": {"abs": FP8_BOUND}}[precision]
    assert len(set(expected)) == STEPS
    assert found[name][:STEPS] == pytest.approx(expected, **bound)


@pytest.mark.parametrize("name", RESUMED)
def test_a_resume_in_another_layout_goes_on_alike(found: Found, name: str) -> None:
    resumed = found["resumed"]
    assert resumed[name] == pytest.approx(resumed["unbroken"], rel=1e-4)


def test_memory_that_runs_out_on_one_rank_changes_no_bit(found: Found) -> None:
    *enough, has_moved = found["enough memory"]
    *short, has_fled = found["short"]
    assert short == enough and (has_moved, has_fled) == (False, True)


def test_the_flag_keeps_sums_out_of_the_switch_and_messages_have_communicators_of_their_own(
    found: Found,
) -> None:
    assert found["the job"] == ["^NVLS", None]
