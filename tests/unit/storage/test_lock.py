"""One writer at a time, whatever the others do and however the first ends."""

import errno
import fcntl
import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from failing_store import failing_store

from patch.errors import CheckpointError, ConfigError
from patch.storage import lock
from patch.storage.lock import check_held, hold_run, hold_target, refuse_held_run, wait_for_cache
from patch.storage.remote import RemotePath

HOLDER = """
import sys
from pathlib import Path
from patch.storage import lock
with lock.hold_run(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
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
flock = fcntl.flock


def no_flock(descriptor: int, operation: int) -> None:
    """A file system without flock; folders, such as /tmp, are on another one."""
    if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    flock(descriptor, operation)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_WAIT_S", 0.1)


@pytest.fixture(params=["disk", "disk without flock", "store"])
def root(request, tmp_path, monkeypatch) -> Path | RemotePath:
    """The folder of a run of this process."""
    if request.param == "store":
        return RemotePath(f"memory://{tmp_path.name}")
    if request.param != "disk":
        monkeypatch.setattr(fcntl, "flock", no_flock)
    return tmp_path / "out"


@pytest.fixture
def holder(tmp_path) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Starts a process that holds tmp_path/out."""
    started: list[subprocess.Popen[bytes]] = []

    def start(program: str = HOLDER) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / "out")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3],
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def write(root: Path | RemotePath, owner: str) -> None:
    if isinstance(root, Path):
        root.mkdir(exist_ok=True)
    (root / ".lock").write_bytes(owner.encode())


def dead(host: str = "", boot: str = "", job: str = "") -> str:
    """What the lock of a process says that had our number before; of this machine, or of another one."""
    here, booted, space, number, _ = lock._identity(os.getpid()).split()
    identity = f"{host or here} {boot or booted} {space} {number} 1"
    return f"process 7 on {host} since today\ntoken\n{identity}\n{job}"


def refusal(root: Path | RemotePath) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        hold_run(root).__enter__()
    return refused.value


def test_second_run_is_told_who_holds_the_folder_and_how_to_remove_the_lock(root) -> None:
    with hold_run(root):
        error = refusal(root)
        assert error.field == ("output_path" if isinstance(root, Path) else "save")
        who = f"{root} is being written by process {os.getpid()} on {socket.gethostname()} since "
        assert re.match(rf"{re.escape(who)}\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d[+-].* give another ", str(error))
        check_held(root / "checkpoint")
        command = shlex.split(str(error).rpartition("remove its lock: ")[2])
        if isinstance(root, Path):
            with pytest.raises(ConfigError):
                refuse_held_run(root)
            subprocess.run(command, check=True)
        else:
            exec(command[2])  # python -c, in this process, whose memory is the store
        check_held(root / "checkpoint")
        with hold_run(root), pytest.raises(CheckpointError, match="was not written: .* belongs to"):
            lock._held.reverse()  # the first of two owners asks
            check_held(root / "checkpoint")
    assert not (root / ".lock").exists()


def test_lock_of_another_host_stays_and_that_of_a_dead_process_is_replaced(root, monkeypatch) -> None:
    """Dead is a process of this host that has ended, and one of this SLURM job before it was requeued."""
    write(root, dead("elsewhere", "boot"))
    assert "is being written by process 7 on elsewhere" in str(refusal(root))
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    write(root, dead("elsewhere", "boot", job="5.1"))
    assert "is being written by process 7 on elsewhere" in str(refusal(root)), "another step of this job"
    write(root, dead("elsewhere", "boot", job="5.0"))
    with hold_run(root):
        pass
    write(root, dead())
    with hold_run(root):
        assert f"process {os.getpid()} ".encode() in (root / ".lock").read_bytes()
        assert "is being written by process" in str(refusal(root))
    assert not (root / ".lock").exists()
    refuse_held_run(Path("/nowhere"))


@pytest.mark.long
@pytest.mark.parametrize("program", [HOLDER, FORK], ids=["alone", "with a child that renders rows"])
def test_killed_process_loses_its_lock_and_a_stopped_one_keeps_it(holder, tmp_path, monkeypatch, program):
    monkeypatch.setattr(lock, "_WAIT_FOR_DYING_S", 20.0)
    process = holder(program)
    process.send_signal(signal.SIGSTOP)
    assert f"written by process {process.pid} on " in str(refusal(tmp_path / "out"))
    threading.Timer(0.2, process.kill).start()
    monkeypatch.setattr(lock, "_WAIT_S", 20.0)
    with hold_run(tmp_path / "out"):
        pass
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("flock", [flock, no_flock])
def test_many_at_once_never_hold_it_together(tmp_path, monkeypatch, flock):
    """The file goes away with each holder, under the eyes of those who wait for it; the first was left."""
    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(lock, "_WAIT_S", 60.0)
    monkeypatch.setattr(lock, "_POLL_S", 0.0)
    (tmp_path / ".hf.lock").write_text(dead())
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


def test_cache_entry_left_on_another_host_is_made_again_and_an_owner_is_waited_for(tmp_path, logged):
    """Where the kernel gives the lock, two that make one entry would only work twice."""
    (tmp_path / ".set.lock").write_text(dead("elsewhere", "boot"))
    held, other = threading.Event(), threading.Thread(target=lambda: wait(held))

    def wait(held: threading.Event) -> None:
        with wait_for_cache(tmp_path / "set"):
            held.set()
            time.sleep(0.5)

    other.start()
    held.wait(20)
    with wait_for_cache(tmp_path / "set"):
        other.join(20)
        assert not other.is_alive()
    assert any(f"set is being written by process {os.getpid()} on " in message for message in logged)


def test_store_without_exclusive_creation_tells_the_slower_one_before_it_publishes() -> None:
    refusal = OSError(errno.ENOSYS, "not implemented")
    with failing_store(None, refusal):
        root = RemotePath("failing://run")
        with hold_run(root):
            write(root, dead("elsewhere"))
            with pytest.raises(CheckpointError, match="now belongs to process 7 on elsewhere"):
                check_held(root / "iter_0000001")
        assert (root / ".lock").read_bytes() == dead("elsewhere").encode(), "it leaves the other one's alone"


def test_answer_of_a_store_that_was_lost_is_no_second_writer(monkeypatch) -> None:
    """The driver sends the request again, and the object is there: our own."""
    root = RemotePath("memory://lost_answer")

    def create(path: RemotePath, content: bytes) -> None:
        path.write_bytes(content)
        raise FileExistsError

    monkeypatch.setattr(RemotePath, "create_bytes", create)
    with hold_run(root):
        pass


def test_what_cannot_be_written_is_named_before_training(tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/out/\.lock cannot be written: Not a directory"):
        hold_run(tmp_path / "file" / "out").__enter__()
    with failing_store(None, PermissionError("Access Denied")):
        with pytest.raises(ConfigError, match=r"failing://bucket/\.lock cannot be written: Access Denied"):
            hold_run(RemotePath("failing://bucket")).__enter__()
