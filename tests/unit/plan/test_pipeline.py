"""The simulated schedule against the formulas where they hold, and by hand where they do not."""


import pytest

from patch.layout.pipeline_stages import smallest_micro_batch_group
from patch.plan.pipeline import Schedule, simulate

SIZES = [(pp, vp, count) for pp in (2, 3, 4, 8) for vp in (1, 2, 3) for count in (pp, pp + 1, 2 * pp, 37)]


def schedule_of(pp_size: int, vp_size: int, count: int) -> Schedule:
    return Schedule(pp_size, vp_size, count, smallest_micro_batch_group(count, pp_size))


@pytest.mark.parametrize(("pp_size", "vp_size", "count"), SIZES)
def test_the_bubble_of_equal_stages_is_that_of_the_formula(pp_size: int, vp_size: int, count: int) -> None:
    stages = pp_size * vp_size
    timing = simulate(schedule_of(pp_size, vp_size, count), [1.0] * stages, [2.0] * stages)
    assert timing.bubble == pytest.approx((pp_size - 1) / (vp_size * count))
    assert timing.computing == pytest.approx([3.0 * vp_size * count] * pp_size)


def test_fewer_micro_batches_than_stages_still_pass_all_of_them() -> None:
    timing = simulate(schedule_of(4, 1, 2), [1.0] * 4, [2.0] * 4)
    assert timing.step == 3 * (4 + 2 - 1)
    assert timing.bubble == pytest.approx(3 / 2)


def test_the_slowest_stage_sets_the_pace() -> None:
    """By hand: the slow last stage gets an input at 1 and works without a gap; one backward follows."""
    timing = simulate(schedule_of(2, 1, 5), [1.0, 2.0], [2.0, 4.0])
    assert timing.step == 1 + 5 * 6 + 2 and timing.ends == [33, 31]
    assert timing.bubble == pytest.approx((2 * 33 - 45) / 45)


def test_a_slow_first_stage_of_several_interleaved_ones_is_waited_for() -> None:
    """Two processes of two stages, two micro-batches a and b, drawn by hand (F0a: forward of stage 0).

    Process 0: F0a 0-2, F0b 2-4, F2a 4-5, F2b 5-6, B2a 7-8, B2b 9-10, B0a 10-12, B0b 12-14.
    Process 1: F1a 2-3, F1b 4-5, F3a 5-6, B3a 6-7, F3b 7-8, B3b 8-9, B1a 9-10, B1b 10-11.
    """
    timing = simulate(schedule_of(2, 2, 2), [2.0, 1.0, 1.0, 1.0], [2.0, 1.0, 1.0, 1.0])
    assert (timing.step, timing.computing, timing.ends) == (14, [12, 8], [14, 11])
