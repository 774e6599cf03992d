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
from pathlib import Path

import pytest

from patch.errors import ConfigError
from patch.storage.lock import hold_run, hold_target, refuse_held_run

HOLD = """
import sys, time
from pathlib import Path
from patch.storage.lock import hold_run
with hold_run(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def start_holder(folder: Path, program: str = HOLD) -> subprocess.Popen[str]:
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    return holder


def test_second_run_is_told_who_holds_the_folder_and_a_killed_holder_frees_it(tmp_path, monkeypatch):
    monkeypatch.setattr("patch.storage.lock._WAIT_S", 0.1)
    holder = start_holder(tmp_path / "out")
    try:
        for ask in (refuse_held_run, lambda output: hold_run(output).__enter__()):
            with pytest.raises(ConfigError) as refused:
                ask(tmp_path / "out")
            said = str(refused.value)
            assert refused.value.field == "output_path"
            process = f"process {holder.pid} on {socket.gethostname()}"
            assert f"{tmp_path / 'out'} is being written by {process}" in said
            assert re.search(r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-].*give another folder", said)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with hold_run(tmp_path / "out"):
        assert f"process {os.getpid()} " in (tmp_path / "out" / ".lock").read_text()
    assert not list((tmp_path / "out").iterdir())


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


def test_child_that_renders_rows_does_not_keep_the_lock_of_a_killed_run(tmp_path, monkeypatch):
    monkeypatch.setattr("patch.storage.lock._WAIT_FOR_DYING_S", 5.0)
    holder = start_holder(tmp_path, FORK)
    holder.kill()
    holder.wait()
    with hold_run(tmp_path):
        pass


def test_dying_holder_is_waited_for(tmp_path):
    holder = start_holder(tmp_path)
    threading.Timer(0.5, holder.kill).start()
    begin = time.monotonic()
    with hold_run(tmp_path):
        assert time.monotonic() - begin > 0.3
    holder.wait()


def test_asking_leaves_no_trace(tmp_path):
    refuse_held_run(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_many_at_once_never_hold_it_together(tmp_path, monkeypatch):
    """The file goes away with each holder, under the eyes of those who wait for it."""
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


def test_file_system_without_locks_is_told_once_and_written(tmp_path, monkeypatch, caplog):
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with hold_run(tmp_path / "out"):
        pass
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No locks available" in caplog.text


def test_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/out/\.lock cannot be written: Not a directory"):
        hold_run(tmp_path / "file" / "out").__enter__()
