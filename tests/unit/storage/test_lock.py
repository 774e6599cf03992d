"""One writer at a time, whatever the others do and however the first ends."""

import errno
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from patch.errors import ConfigError
from patch.storage import lock
from patch.storage.lock import check_held, hold_run, hold_target, refuse_held_run

pytestmark = pytest.mark.long

ELSEWHERE = """
import errno, fcntl, os, socket, sys
from pathlib import Path
from patch.errors import CheckpointError
from patch.storage import lock
folder, flock, host = sys.argv[1:4]
lock._BEAT_S = 0.2
os.fsync = lambda descriptor: None  # a busy disk takes longer than a beat
def no_flock(descriptor, operation):
    raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
if flock != "works":
    fcntl.flock = no_flock if flock == "none" else lambda descriptor, operation: None
if host:
    socket.gethostname = lambda: host
with lock.hold_run(Path(folder)):
    print("held", flush=True)
    for line in sys.stdin:
        try:
            lock.check_held(Path(folder) / "checkpoint")
            print("ours", flush=True)
        except CheckpointError as error:
            print(error, flush=True)
"""
"""A holder as another machine shows it: its flock works here, is not seen here, or does not exist."""


@pytest.fixture
def holder(tmp_path, monkeypatch) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a holder of tmp_path/out; in the test's own process a lock is stale after a second."""
    for name, value in (("_BEAT_S", 0.2), ("_STALE_S", 1.0), ("_SETTLE_S", 0.2), ("_WAIT_S", 0.1)):
        monkeypatch.setattr(lock, name, value)
    started: list[subprocess.Popen[str]] = []

    def start(flock: str, host: str = "", program: str = ELSEWHERE) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / "out"), flock, host],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3],
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def answer(process: subprocess.Popen[str]) -> str:
    """Whether the holder's lock is still its own."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("?\n")
    process.stdin.flush()
    return process.stdout.readline()


def test_second_run_is_told_who_holds_the_folder(holder, tmp_path):
    process = holder("works")
    for ask in (refuse_held_run, lambda output: hold_run(output).__enter__()):
        with pytest.raises(ConfigError) as refused:
            ask(tmp_path / "out")
        said = str(refused.value)
        assert refused.value.field == "output_path"
        owner = f"process {process.pid} on {socket.gethostname()}"
        assert f"{tmp_path / 'out'} is being written by {owner}" in said
        assert re.search(r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-].*give another folder", said)


FORK = """
import sys, time
from pathlib import Path
from patch.data.rendering.bounded_process import BoundedMap
from patch.storage.lock import hold_run
with hold_run(Path(sys.argv[1])):
    rows = BoundedMap(time.sleep)([[0], [60]])
    next(rows)
    print("held", flush=True)
    next(rows)
"""


def test_child_that_renders_rows_does_not_keep_the_lock_of_a_killed_run(holder, tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_WAIT_FOR_DYING_S", 5.0)
    process = holder("works", program=FORK)
    process.kill()
    process.wait()
    with hold_run(tmp_path / "out"):
        pass


def test_dying_holder_is_waited_for(holder, tmp_path, monkeypatch):
    process = holder("works")
    monkeypatch.setattr(lock, "_WAIT_S", 3.0)
    threading.Timer(0.5, process.kill).start()
    begin = time.monotonic()
    with hold_run(tmp_path / "out"):
        assert time.monotonic() - begin > 0.3


def test_asking_leaves_no_trace(tmp_path):
    refuse_held_run(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def no_flock(descriptor: int, operation: int) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


@pytest.mark.parametrize("flock", [fcntl.flock, no_flock])
def test_many_at_once_never_hold_it_together(tmp_path, monkeypatch, flock):
    """The file goes away with each holder, under the eyes of those who wait for it."""
    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr("patch.storage.lock._WAIT_S", 60.0)
    monkeypatch.setattr("patch.storage.lock._POLL_S", 0.0)
    inside, largest = [0], [0]

    def enter() -> None:
        for _ in range(20):
            with hold_target(tmp_path / "hf"):
                inside[0] += 1
                largest[0] = max(largest[0], inside[0])
                time.sleep(0.001)
                inside[0] -= 1

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert largest == [1] and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("theirs", "host", "ours"),
    [
        ("works", "", None),
        ("none", "", no_flock),
        ("none", "elsewhere", no_flock),
        ("works", "elsewhere", None),
        ("unseen", "elsewhere", None),
    ],
)
def test_living_holder_keeps_its_lock_and_a_killed_one_loses_it(
    holder, tmp_path, monkeypatch, theirs, host, ours
) -> None:
    process = holder(theirs, host)
    if ours is not None:
        monkeypatch.setattr(fcntl, "flock", ours)
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"being written by process {process.pid} on {host}"):
            hold_run(tmp_path / "out").__enter__()
    assert answer(process) == "ours\n"
    process.kill()
    process.wait()
    begin = time.monotonic()
    with hold_run(tmp_path / "out"):
        assert f"process {os.getpid()} " in (tmp_path / "out" / ".lock").read_text()
        took_s = time.monotonic() - begin
        assert not host or took_s > 0.2, "a holder on another machine is given time to renew it"
        with pytest.raises(ConfigError):
            hold_run(tmp_path / "out").__enter__()
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("theirs", ["works", "none"])
def test_holder_that_stood_still_notices_that_it_lost_the_lock(holder, tmp_path, monkeypatch, theirs) -> None:
    """Its flock is still held, as that of a machine that died while NFS waits for it."""
    process = holder(theirs, "elsewhere")
    process.send_signal(signal.SIGSTOP)
    if theirs == "none":
        monkeypatch.setattr(fcntl, "flock", no_flock)
    with hold_run(tmp_path / "out"):
        process.send_signal(signal.SIGCONT)
        said = answer(process)
        assert (
            f"checkpoint was not written: {tmp_path / 'out'} now belongs to process {os.getpid()} on " in said
        )
        process.communicate("")
        assert f"process {os.getpid()} " in (tmp_path / "out" / ".lock").read_text(), "it leaves ours alone"
        check_held(tmp_path / "out" / "checkpoint")
    check_held(tmp_path / "out" / "checkpoint")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("has_flock", [True, False])
def test_of_many_who_take_over_at_once_one_wins(holder, tmp_path, monkeypatch, has_flock) -> None:
    process = holder("works" if has_flock else "none", "elsewhere")
    process.send_signal(signal.SIGSTOP)
    if not has_flock:
        monkeypatch.setattr(fcntl, "flock", no_flock)
    won, refused, done = [], [], threading.Event()

    def take() -> None:
        try:
            with hold_run(tmp_path / "out"):
                won.append(threading.get_ident())
                done.wait(20)
        except ConfigError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=take) for _ in range(5)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 20
    while len(won) + len(refused) < 5 and time.monotonic() < deadline:
        time.sleep(0.02)
    done.set()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and len(refused) == 4


def test_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/out/\.lock cannot be written: Not a directory"):
        hold_run(tmp_path / "file" / "out").__enter__()
