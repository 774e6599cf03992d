"""The engine of the simulation against schedules drawn by hand and longest paths of random graphs."""

import random

import pytest

from patch.plan.simulation.streams import Span, Task, simulate


def test_a_stream_keeps_its_order_and_waits() -> None:
    """By hand; the third task could begin at 0, but stands behind one that waits."""
    tasks = [
        Task("compute", 2.0),
        Task("link", 3.0, after=(0,)),
        Task("link", 1.0),
        Task("compute", 1.0, after=(2,)),
        Task("compute", 0.0),
    ]
    assert simulate(tasks) == [Span(0, 2), Span(2, 5), Span(5, 6), Span(6, 7), Span(7, 7)]


def test_tasks_may_wait_for_what_is_given_later() -> None:
    assert simulate([Task("a", 1.0, after=(1,)), Task("b", 2.0)]) == [Span(2, 3), Span(0, 2)]


def test_a_circle_is_named() -> None:
    with pytest.raises(ValueError, match="task 0 .first."):
        simulate([Task("a", 1.0, (1,), "first"), Task("b", 1.0, (0,), "second")])


def test_longest_paths_of_random_graphs() -> None:
    """A task's end is the longest path to it, over what it waits for and its predecessor on the stream."""
    draw = random.Random(1)
    for _ in range(50):
        tasks = [
            Task(
                draw.randrange(4), draw.randrange(4), tuple(draw.sample(range(i), min(i, draw.randrange(4))))
            )
            for i in range(60)
        ]
        ends: list[float] = []
        for index, task in enumerate(tasks):
            before = [other for other in range(index) if tasks[other].stream == task.stream][-1:]
            ends.append(max((ends[i] for i in [*task.after, *before]), default=0.0) + task.seconds)
        assert [span.end for span in simulate(tasks)] == ends


def test_two_streams_that_share_a_link() -> None:
    """Each has half of it while both send: 2 s alone; the shorter takes 2, then the longer is alone."""
    tasks = [Task("a", 2.0), Task("b", 1.0), Task("b", 1.0, after=(0,))]
    spans = simulate(tasks, {("a", "b"): 2.0, ("b", "a"): 2.0})
    assert spans == [Span(0, 3), Span(0, 2), Span(3, 4)]


def test_compute_that_messages_slow_down() -> None:
    """Compute of 4 s loses 1/4 of its speed from 1 to 3 and all factors at once from 2 to 3."""
    tasks = [
        Task("wait", 1.0), Task("wait", 1.0), Task("compute", 4.0), Task("x", 2.0, after=(0,)),
        Task("y", 1.0, after=(1,)),
    ]  # fmt: skip
    spans = simulate(tasks, {("compute", "x"): 4 / 3, ("compute", "y"): 1.5})
    assert spans[2].end == pytest.approx(3 + (4 - 1 - 3 / 4 - 1 / 2))


def test_work_is_conserved_under_contention() -> None:
    """Of random loads of two streams that share a link, the last message ends when all bytes are sent."""
    draw = random.Random(2)
    for _ in range(20):
        tasks = [Task(draw.choice("ab"), draw.random()) for _ in range(30)]
        end = max(span.end for span in simulate(tasks, {("a", "b"): 2.0, ("b", "a"): 2.0}))
        assert end == pytest.approx(sum(task.seconds for task in tasks))
