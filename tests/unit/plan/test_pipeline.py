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


PIPELINE = [
    (2, 1, 2, 0.518, 0.506), (2, 1, 4, 0.275, 0.257), (2, 1, 8, 0.144, 0.132), (2, 2, 2, 0.309, 0.270),
    (2, 2, 4, 0.156, 0.140), (2, 2, 8, 0.110, 0.078), (4, 1, 4, 0.791, 0.763), (4, 1, 8, 0.400, 0.387),
    (4, 1, 16, 0.218, 0.197), (4, 2, 4, 0.474, 0.407), (4, 2, 8, 0.285, 0.213), (4, 2, 16, 0.148, 0.119),
]  # fmt: skip
"""RESULTS.md, pipeline, 22 Nov 2026: p, v, m, the bubble at 100 ms and at 300 ms a micro-batch."""


def test_pipelines_take_the_measured_times() -> None:
    """2 ms a message, as RESULTS.md says of v = 1; steps within 5 %, those of v = 1 within 1.5 %."""
    for pp, vp, count, *bubbles in PIPELINE:
        schedule = Schedule(pp, vp, count, smallest_micro_batch_group(count, pp))
        for seconds, bubble in zip((0.1, 0.3), bubbles, strict=True):
            passes = [[seconds / vp * share] * pp * vp for share in (1 / 3, 2 / 3)]
            bound = 0.015 if vp == 1 else 0.05
            measured = seconds * count * (1 + bubble)
            assert simulate(schedule, *passes, 2e-3).step == pytest.approx(measured, rel=bound), (pp, vp)
