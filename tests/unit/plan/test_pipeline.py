"""The simulated schedule against the formulas where they hold, and by hand where they do not."""
import itertools
import re
from collections.abc import Iterator

import pytest
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

from patch.layout.pipeline_stages import smallest_micro_batch_group
from patch.plan.pipeline import Schedule, simulate
from toolkits._schedule import drawing

SIZES = [(pp, vp, count) for pp in (2, 3, 4, 8) for vp in (1, 2, 3) for count in (pp, pp + 1, 2 * pp, 37)]


def schedule_of(pp_size: int, vp_size: int, count: int) -> Schedule:
    return Schedule(pp_size, vp_size, count, smallest_micro_batch_group(count, pp_size))


@pytest.mark.parametrize(("pp_size", "vp_size", "count"), SIZES)
def test_the_bubble_of_equal_stages_is_that_of_the_formula(pp_size: int, vp_size: int, count: int) -> None:
    stages = pp_size * vp_size
    timing = simulate(schedule_of(pp_size, vp_size, count), [1.0] * stages, [2.0] * stages)
    assert timing.bubble == pytest.approx((pp_size - 1) / (vp_size * count))
    assert timing.computing == pytest.approx([3.0 * vp_size * count] * pp_size)


@pytest.fixture
def upstream_rank() -> Iterator[None]:
    yield
    parallel_state.destroy_model_parallel()


@pytest.mark.parametrize(("pp_size", "vp_size", "count"), SIZES)
@pytest.mark.usefixtures("upstream_rank")
def test_the_order_is_that_of_upstreams_schedule(pp_size: int, vp_size: int, count: int) -> None:
    """Its table, its number of forwards before the first backward, then one of each in turn."""
    schedule = schedule_of(pp_size, vp_size, count)
    table = get_schedule_table(count, vp_size, schedule.group_size)
    parallel_state.set_pipeline_model_parallel_world_size(pp_size)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(vp_size if vp_size > 1 else None)
    for rank in range(pp_size):
        parallel_state.set_pipeline_model_parallel_rank(rank)
        _, _, warm_up, rest = get_pp_rank_microbatches(count, vp_size, schedule.group_size)
        forwards = [(True, chunk, micro_batch) for micro_batch, chunk in table]
        backwards = [(False, vp_size - 1 - chunk, micro_batch) for micro_batch, chunk in table]
        pairs = [each for pair in zip(forwards[warm_up:], backwards[:rest], strict=True) for each in pair]
        assert list(schedule.passes(rank)) == forwards[:warm_up] + pairs + backwards[rest:]


@pytest.mark.parametrize(("pp_size", "vp_size", "count"), SIZES)
@pytest.mark.parametrize("all_forward", [False, True])
def test_drawn_slots_follow_their_inputs_and_idle_as_the_formula(
    pp_size: int, vp_size: int, count: int, all_forward: bool
) -> None:
    if all_forward and vp_size > 1:  # not drawn
        return
    schedule = schedule_of(pp_size, vp_size, count)._replace(all_forward=all_forward)
    title, rows = drawing("all", schedule)
    ends = dict[tuple[str, int, int], int]()
    for rank, row in enumerate(rows):
        for begin, width, label, _ in row:
            kind, number, chunk = re.fullmatch(r"([FB])(\d+)([a-c]?)", label).groups()
            assert width == (1 if kind == "F" else 2)
            ends[kind, "abc".index(chunk) * pp_size + rank, int(number)] = begin + width
        assert all(one.begin + one.width <= other.begin for one, other in itertools.pairwise(row))
        if all_forward:
            assert [drawn.label[0] for drawn in row] == ["F"] * count + ["B"] * count
    assert len(ends) == 2 * pp_size * vp_size * count
    for (kind, stage, number), end in ends.items():
        needed = [("F", stage - (kind == "F"), number), *[("B", stage + 1, number)] * (kind == "B")]
        assert end - (1 if kind == "F" else 2) >= max(ends.get(each, 0) for each in needed)
    computing = 3 * vp_size * count * pp_size
    idle = (pp_size * max(ends.values()) - computing) / computing
    assert idle == pytest.approx((pp_size - 1) / (vp_size * count)) and f"idle {idle:.1%} of" in title


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
