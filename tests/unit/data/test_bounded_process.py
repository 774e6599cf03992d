"""Lists of items in several bounded children: the order of results, of errors, and children that die."""

import gc
import os
import random
import signal
import time
from multiprocessing import parent_process, util

import psutil
import pytest

from patch.data.rendering.bounded_process import BoundedMap, ChildEndedError
from patch.errors import DataError


def work(item: tuple[int, float]) -> int:
    """The square of a number after some seconds; a negative number is an error, 666 ends its process."""
    number, seconds = item
    time.sleep(seconds)
    if number == 666:
        os.kill(os.getpid(), signal.SIGKILL)
    if number < 0:
        raise DataError(f"number {number}")
    return number**2


@pytest.mark.parametrize("processes", [1, 3])
def test_results_come_in_the_order_of_the_lists(processes: int) -> None:
    """Every third list takes longest, so later ones are finished before it."""
    lists = [[(number, 0.02 * (number % 3 == 0)), (number + 1, 0)] for number in range(40)]
    given = list(BoundedMap(work, processes)(iter(lists)))
    assert given == [(items, [number**2 for number, _ in items]) for items in lists]


def test_input_is_read_only_as_far_ahead_as_children_and_waiting_results_need() -> None:
    """The first list takes a second, in which the second child could finish all the others."""
    num_read = 0

    def lists():
        nonlocal num_read
        for number in range(300):
            num_read += 1
            yield [(number, 1.0 if number == 0 else 0.0)]

    results = BoundedMap(work, 2)(lists())
    next(results)
    assert num_read < 12
    assert len(list(results)) == 299 == num_read - 1


def test_first_error_in_order_is_raised_after_all_results_before_it_and_ends_the_processes() -> None:
    """It comes late, and the one after it at once. The processes end although the error is still at hand."""
    before = set(psutil.Process().children())
    lists = [*([(number, 0.01)] for number in range(5)), [(5, 0.0), (-1, 0.2)], [(-2, 0.0)]]
    given = []
    with pytest.raises(DataError, match="^number -1$") as caught:
        for _, results in BoundedMap(work, 3)(lists):
            given += results
    assert given == [0, 1, 4, 9, 16]
    _, living = psutil.wait_procs(set(psutil.Process().children()) - before, timeout=30)
    assert not living and caught.tb


def test_killed_child_names_its_item_and_the_others_end_with_the_map() -> None:
    before = set(psutil.Process().children())
    rows = BoundedMap(work, 3)
    children = set(psutil.Process().children()) - before
    assert len(children) == 3
    pick = random.Random(0)
    lists = [[(number, pick.random() / 50)] for number in range(20)]
    lists[7] = [(1, 0.0), (666, 0.0), (2, 0.0)]
    given = []
    with pytest.raises(ChildEndedError, match="has ended its process .-9.") as caught:
        for _, results in rows(lists):
            given += results
    assert caught.value.item == (666, 0.0) and caught.value.was_killed
    assert given == [number**2 for number in range(len(given))] and len(given) < 8
    del rows, caught
    gc.collect()  # the traceback has the map, in a cycle
    assert not any(child.is_running() for child in children)


@pytest.mark.timeout(60)
@pytest.mark.long
def test_each_item_has_its_time_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three items each has less than its two seconds. The fourth has no end, nor has another process."""
    monkeypatch.setattr("patch.data.rendering.bounded_process.SECONDS", 2)

    def spin(seconds: float) -> None:
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass
        time.sleep(60 if seconds == 0 else 0)

    with pytest.raises(ChildEndedError, match="^takes more than 2 s$") as caught:
        list(BoundedMap(spin, 2)([[0.0], [0.7, 0.7, 0.7, 60.0]]))
    assert caught.value.item == 60.0 and not caught.value.was_killed


def test_process_that_is_killed_between_two_lists_is_told() -> None:
    before = set(psutil.Process().children())
    rows = BoundedMap(work)
    assert next(rows([[(3, 0.0)]]))[1] == [9]
    for child in set(psutil.Process().children()) - before:
        child.kill()
    with pytest.raises(ChildEndedError) as caught:
        list(rows([[(3, 0.0)]]))
    assert caught.value.was_killed


def test_garbage_of_the_parent_is_not_collected_in_its_children() -> None:
    """Such as process groups, whose end waits for threads that a fork does not take along."""

    class Garbage:
        def __del__(self) -> None:
            assert parent_process() is None or os._exit(11)

    key, garbage = Garbage(), Garbage()
    garbage.itself = garbage
    del garbage
    util.register_after_fork(key, lambda _: gc.collect())
    assert next(BoundedMap(work)([[(3, 0.0)]]))[1] == [9]
