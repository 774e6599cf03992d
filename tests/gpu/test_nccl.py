"""Two ranks over NCCL: every level, layout and placement learns alike.

On one GPU both share it, which NCCL 2.30 can: LD_PRELOAD its libnccl.so.2 where torch brings an older one.
"""

from collections.abc import Callable

import pytest
from gpu.nccl_ranks import FP8, LAYOUTS, LEVELS, OTHERS, RESUMED, STEPS, Found, is_possible, run_ranks

FP8_BOUND = 0.05
"""On losses near 5.6 over five steps; tensor parallelism scales and sums other parts."""


pytestmark = pytest.mark.skipif(not is_possible(), reason="needs two CUDA devices, or one and NCCL 2.30")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, figure: Callable[[str, object], None]) -> Found:
    found = run_ranks(2, tmp_path_factory.mktemp("nccl"), "gpu.nccl_ranks:all_layouts", 260)
    figure("seconds of each part, 2 ranks", found.seconds)
    return found


@pytest.mark.parametrize("level", LEVELS)
def test_placement_changes_no_bit(found: Found, level: str) -> None:
    assert found[f"{level}, on the device"] == found[f"{level}, half on the host"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_learn_alike(found: Found, name: str) -> None:
    expected = found["none, on the device"][:STEPS]
    assert len(set(expected)) == STEPS
    assert found[name][:STEPS] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", [name for name in OTHERS if "," in name])
def test_packing_windows_and_8_bits_learn_alike_in_every_layout(found: Found, name: str) -> None:
    expected = found[name.split(",")[0]][:STEPS]
    bound = {"abs": FP8_BOUND} if OTHERS[name].items() >= FP8.items() else {"rel": 1e-4}
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
