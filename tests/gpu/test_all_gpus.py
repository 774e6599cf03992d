"""Over all GPUs: ZeRO-2 with states on the host, a save in the background, instances, TP, the ring.

One rank a GPU; two ranks share one GPU where there is but one, which NCCL 2.30 can (see test_nccl.py).
"""

from collections.abc import Callable

import pytest
import torch
from gpu.nccl_ranks import STEPS, Found, is_possible, run_ranks

pytestmark = pytest.mark.skipif(not is_possible(), reason="needs two CUDA devices, or one and NCCL 2.30")


NUM_RANKS = max(2, torch.cuda.device_count() // 2 * 2)
"""Pairs are needed: of an odd number of GPUs one stays idle."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, figure: Callable[[str, object], None]) -> Found:
    found = run_ranks(NUM_RANKS, tmp_path_factory.mktemp("all"), "gpu.nccl_ranks:on_all_gpus", 200)
    figure(f"seconds of each part, {NUM_RANKS} ranks", found.seconds)
    return found


def test_forty_steps_with_half_of_the_states_on_the_host_have_the_bits_of_states_on_the_gpu(
    found: Found,
) -> None:
    *losses, digest = found["40 steps"]
    assert len(set(losses)) == 40
    assert found["40 steps, half on the host"] == [*losses, digest]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_no_process_holds_memory_of_anothers_gpu_after_a_save_in_the_background(
    found: Found,
) -> None:
    assert found["other contexts"] == [[]] * NUM_RANKS


@pytest.mark.parametrize("layout", ["tensor", "context, ring"])
def test_layouts_learn_alike(found: Found, layout: str) -> None:
    assert found[layout][:STEPS] == pytest.approx(found["alike"][:STEPS], rel=1e-4)


@pytest.mark.skipif(NUM_RANKS < 4, reason="needs four CUDA devices: an instance of one rank shards nothing")
def test_two_instances_learn_alike(found: Found) -> None:
    assert found["two instances"][:STEPS] == pytest.approx(found["alike"][:STEPS], rel=1e-4)


def test_tensor_parallel_states_on_the_host_have_the_bits_of_those_on_the_gpu(found: Found) -> None:
    assert found["tensor, half on the host"] == found["tensor"]


def test_the_ring_learns_alike_in_bf16(found: Found) -> None:
    """By flash-attn 3 where it is installed."""
    assert found["context, ring in bf16"][:STEPS] == pytest.approx(found["alike in bf16"][:STEPS], rel=5e-3)


def test_sums_stay_out_of_the_switch_and_the_ranks_end_well(found: Found) -> None:
    assert found["the job"] == ["^NVLS", None]
