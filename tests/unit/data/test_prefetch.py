"""Background reading gives the reader's batches, in order, a few steps ahead; errors rise in their step."""

import threading
import time

import pytest
import torch

from patch.data.order import read_ahead
from patch.data.samples import Batch
from patch.errors import DataError


class Recording:
    """Batches that hold the iteration; writes down what is read, and by which thread."""

    def __init__(self, broken_at: int | None = None) -> None:
        self.read: list[int] = []
        self.threads: set[str] = set()
        self._broken_at = broken_at

    def step(self, iteration: int) -> list[Batch]:
        self.read.append(iteration)
        self.threads.add(threading.current_thread().name)
        if iteration == self._broken_at:
            raise DataError(f"step {iteration} is damaged")
        value = torch.tensor([[iteration]])
        return [Batch(value, value, value)]


def wait_for(is_done) -> None:
    deadline = time.monotonic() + 10
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def numbers(batches: list[Batch]) -> list[int]:
    return [int(batch.tokens) for batch in batches]


@pytest.mark.parametrize("num_ahead", [0, 1, 3])
def test_batches_are_those_of_the_reader_in_order(num_ahead: int) -> None:
    reader = Recording()
    with read_ahead(reader, range(4, 12), num_ahead) as ahead:
        assert [numbers(ahead.step(iteration)) for iteration in range(4, 12)] == [[i] for i in range(4, 12)]
    assert reader.read == list(range(4, 12))
    assert reader.threads == ({"MainThread"} if num_ahead == 0 else {"read ahead"})


def test_thread_reads_so_many_steps_ahead_and_no_more() -> None:
    reader = Recording()
    with read_ahead(reader, range(100), 3) as ahead:
        for taken in range(1, 5):
            wait_for(lambda count=taken + 2: len(reader.read) >= count)
            time.sleep(0.01)
            assert reader.read == list(range(taken + 2))
            ahead.step(taken - 1)


def test_last_step_may_be_taken_again_and_an_error_rises_in_the_step_that_needs_the_data() -> None:
    """A step that ran out of memory is done again with its data."""
    with read_ahead(Recording(broken_at=2), range(9), 5) as ahead:
        assert [numbers(ahead.step(iteration)) for iteration in (0, 0, 1, 1)] == [[0], [0], [1], [1]]
        for _ in range(2):
            with pytest.raises(DataError, match="step 2 is damaged"):
                ahead.step(2)


def test_thread_ends_with_the_context_also_when_nothing_or_not_all_was_taken() -> None:
    before = threading.active_count()
    for num_taken in (0, 1, 4):
        with pytest.raises(KeyboardInterrupt), read_ahead(Recording(), range(10**9), 2) as ahead:
            for iteration in range(num_taken):
                ahead.step(iteration)
            raise KeyboardInterrupt
    assert threading.active_count() == before


def test_read_that_hangs_does_not_keep_the_process_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patch.data.order._END_S", 0.05)
    release = threading.Event()

    class Hanging(Recording):
        def step(self, iteration: int) -> list[Batch]:
            release.wait(10)
            return super().step(iteration)

    begin = time.monotonic()
    with read_ahead(Hanging(), range(3), 1):
        thread = next(thread for thread in threading.enumerate() if thread.name == "read ahead")
    assert time.monotonic() - begin < 5 and thread.is_alive() and thread.daemon
    release.set()
    thread.join(10)
    assert not thread.is_alive()
