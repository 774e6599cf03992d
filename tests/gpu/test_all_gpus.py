"""Over all GPUs: ZeRO-2 with states on the host, a save in the background, instances, TP, the ring.

One rank a GPU; two ranks share one GPU where there is but one, which NCCL 2.30 can (see test_nccl.py).
"""

from typing import Any

import pytest
import torch
from gpu.nccl_ranks import STEPS, is_possible, run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_possible(), reason="needs two CUDA devices, or one and NCCL 2.30"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(max(2, torch.cuda.device_count()), tmp_path_factory.mktemp("all"), "all-gpus", 200)


def test_forty_steps_with_half_of_the_states_on_the_host_have_the_bits_of_states_on_the_gpu(
    found: dict[str, Any],
) -> None:
    *losses, digest = found["40 steps"]
    assert len(set(losses)) == 40
    assert found["40 steps, half on the host"] == [*losses, digest]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_no_process_holds_memory_of_anothers_gpu_after_a_save_in_the_background(
    found: dict[str, Any],
) -> None:
    assert found["other contexts"] == [[]] * torch.cuda.device_count()


@pytest.mark.parametrize("layout", ["two instances", "tensor, half on the host", "context, ring"])
def test_layouts_learn_alike(found: dict[str, Any], layout: str) -> None:
    assert found[layout][:STEPS] == pytest.approx(found["alike"][:STEPS], rel=1e-4)


def test_the_ring_learns_alike_in_bf16(found: dict[str, Any]) -> None:
    """By flash-attn 3 where it is installed."""
    assert found["context, ring in bf16"][:STEPS] == pytest.approx(found["alike in bf16"][:STEPS], rel=5e-3)
