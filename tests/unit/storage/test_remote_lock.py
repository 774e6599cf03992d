"""One run for each folder in a store, on which nobody can hold a kernel's lock."""

import os
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest
from failing_store import failing_store

from patch.errors import ConfigError
from patch.storage import lock
from patch.storage.lock import check_held, hold_run
from patch.storage.remote import RemotePath

OTHER_MACHINE = "process 7 on elsewhere since yesterday\n{token}\nelsewhere boot pid:[1] 7 99\n{renewed}\n"


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> RemotePath:
    for name, value in (("_SETTLE_S", 0.01), ("_WAIT_S", 0.1), ("_POLL_S", 0.01), ("_BEAT_S", 0.05)):
        monkeypatch.setattr(lock, name, value)
    return RemotePath(f"memory://{request.node.name}")


def test_second_run_is_told_who_writes_there_and_the_end_of_the_first_frees_it(root) -> None:
    with hold_run(root):
        with pytest.raises(ConfigError) as refused, hold_run(root):
            pass
        assert refused.value.field == "save"
        said = f"{root} is being written by process {os.getpid()} on {socket.gethostname()} since "
        assert said in str(refused.value) and "give another URL" in str(refused.value)
        check_held(root / "iter_0000001")
    assert not root.files()
    with hold_run(root):
        pass


def test_of_two_that_start_at_once_the_slower_writer_is_refused(root, monkeypatch) -> None:
    """Both have seen that nobody holds it, and the slower one writes when the other one has it."""
    describe = lock._describe_self

    def describe_late() -> bytes:
        monkeypatch.setattr(lock, "_describe_self", describe)
        other.enter_context(hold_run(root))
        return describe()

    monkeypatch.setattr(lock, "_describe_self", describe_late)
    with ExitStack() as other, pytest.raises(ConfigError, match="is being written by"), hold_run(root):
        pass


def test_owner_on_another_machine_is_alive_as_long_as_it_renews_its_lock(root, monkeypatch) -> None:
    monkeypatch.setattr(lock, "_STALE_S", 0.3)
    (root / ".lock").write_bytes(OTHER_MACHINE.format(token="t", renewed=1.0).encode())
    with hold_run(root):  # silent for three beats, and for long
        assert b"elsewhere" not in (root / ".lock").read_bytes()
    (root / ".lock").write_bytes(OTHER_MACHINE.format(token="u", renewed=1.0).encode())
    content, _, _ = (root / ".lock").read_bytes().rpartition(b"1.0")
    writer = lock._HeldLock(root / ".lock", content)
    try:
        with pytest.raises(ConfigError, match="being written by process 7 on elsewhere"), hold_run(root):
            pass
    finally:
        writer.release()


def test_lock_of_a_killed_process_of_this_machine_is_taken_at_once(root) -> None:
    program = "import os, patch.storage.lock as lock; print(lock._identity(os.getpid()))"
    identity = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    text = f"process {identity.split()[3]} on {socket.gethostname()} since now\ntoken\n{identity}1.0\n"
    (root / ".lock").write_bytes(text.encode())
    with hold_run(root):
        assert f"process {os.getpid()} ".encode() in (root / ".lock").read_bytes()


def test_store_that_refuses_to_be_written_is_named_before_training() -> None:
    with failing_store(FileNotFoundError(), None, PermissionError("Access Denied")):
        with pytest.raises(ConfigError, match=r"failing://bucket/\.lock cannot be written: Access Denied"):
            with hold_run(RemotePath("failing://bucket")):
                pass
