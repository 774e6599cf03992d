"""Which checkpoint is the newest, and how a written one takes its name."""

import os
import time
from pathlib import Path

import pytest

from patch.checkpoint import latest_iteration, weights_folder
from patch.checkpoint.folder import iteration_folder, open_staging, publish
from patch.checkpoint.manifest import write_manifest
from patch.config import user_message
from patch.errors import CheckpointError
from patch.storage.checksums import content

TRACKER = "latest_checkpointed_iteration.txt"


def write_files(folder: Path, text: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = (".metadata", "common.pt", "metadata.json")
    for name in names:
        (folder / name).write_text(text)
    iteration = int(folder.name.removeprefix("iter_").removesuffix(".tmp"))
    write_manifest(folder, iteration, {name: content(folder / name) for name in names})


def wait_for_the_clock(folder: Path) -> None:
    """Until a new file has a later time than those that are there."""
    probe = folder / "probe"
    begin = time.time_ns()
    while True:
        probe.write_bytes(b"")
        if probe.stat().st_mtime_ns > begin:
            break
        time.sleep(0.001)
    probe.unlink()


def test_latest_iteration_is_none_without_a_checkpoint(tmp_path):
    assert latest_iteration(tmp_path / "not_there") is None
    assert latest_iteration(tmp_path) is None
    (tmp_path / "iter_0000007.tmp").mkdir()
    assert latest_iteration(tmp_path) is None


def test_latest_iteration_follows_a_tracker_that_was_set_back_by_hand(tmp_path, caplog):
    """Also when the run has gone on from there, and saved before the checkpoint that it left behind."""
    for iteration in (10, 30):
        write_files(iteration_folder(tmp_path, iteration))
    (tmp_path / TRACKER).write_text("30\n")
    wait_for_the_clock(tmp_path)
    (tmp_path / TRACKER).write_text("10\n")
    assert latest_iteration(tmp_path) == 10
    write_files(open_staging(iteration_folder(tmp_path, 20)))
    publish(iteration_folder(tmp_path, 20))
    assert latest_iteration(tmp_path) == 20 and not caplog.text


def test_latest_iteration_is_one_that_a_kill_kept_from_the_tracker(tmp_path, caplog):
    """A checkpoint exists when its marker does. One that was left behind before (40) plays no part."""
    for iteration in (10, 40, 20):
        write_files(iteration_folder(tmp_path, iteration))
    wait_for_the_clock(tmp_path)
    (tmp_path / TRACKER).write_text("20\n")
    assert latest_iteration(tmp_path) == 20
    wait_for_the_clock(tmp_path)
    write_files(iteration_folder(tmp_path, 30))
    assert latest_iteration(tmp_path) == 30 and weights_folder(tmp_path).name == "iter_0000030"
    assert "iter_0000030 was completed after that" in caplog.text
    (iteration_folder(tmp_path, 30) / "common.pt").write_text("damaged")
    assert latest_iteration(tmp_path) == 20


@pytest.mark.parametrize("tracked", ["30", "not a number", "", "1" * 5000, b"\xff\xfe"])
def test_latest_iteration_falls_back_and_says_so_when_the_tracker_is_wrong(tmp_path, caplog, tracked):
    for iteration in (2, 10):
        write_files(iteration_folder(tmp_path, iteration))
    write_files(iteration_folder(tmp_path, 30))
    (iteration_folder(tmp_path, 30) / "checksums.json").unlink()
    write_files(tmp_path / "iter_0000040.tmp")
    (tmp_path / TRACKER).write_bytes(tracked if isinstance(tracked, bytes) else tracked.encode())
    assert latest_iteration(tmp_path) == 10
    assert "iter_0000030/checksums.json is missing" in caplog.text and "iteration 10 is taken" in caplog.text
    assert (TRACKER in caplog.text) == (tracked != "30")


def an_endless_file(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("put", "said"),
    [
        (os.mkdir, "Is a directory.*remove"), (os.mkfifo, "a pipe or a device"),
        # as /dev/zero, but not endless if it is read nevertheless
        (lambda path: path.symlink_to("/dev/null"), "a pipe or a device"),
        (an_endless_file, "expected at most 65536"),
    ],
)  # fmt: skip
def test_tracker_is_looked_at_before_it_is_read(tmp_path, put, said):
    write_files(iteration_folder(tmp_path, 2))
    put(tmp_path / TRACKER)
    for look in (latest_iteration, weights_folder):
        with pytest.raises(CheckpointError, match=f"{TRACKER} cannot be read: .*{said}"):
            look(tmp_path)


def test_checkpoints_of_another_program_have_no_marker_and_give_weights_alone(tmp_path):
    for iteration in (2, 10):
        write_files(iteration_folder(tmp_path, iteration))
        (iteration_folder(tmp_path, iteration) / "checksums.json").unlink()
    (tmp_path / TRACKER).write_text("2")
    assert weights_folder(tmp_path) == iteration_folder(tmp_path, 2)
    with pytest.raises(CheckpointError, match="iter_0000002/checksums.json is missing.* another program"):
        latest_iteration(tmp_path)


@pytest.mark.parametrize("name", [TRACKER, "iter_0000030", "iter_0000030.old"])
def test_latest_iteration_refuses_to_begin_anew_over_a_damaged_checkpoint(tmp_path, name):
    if name == TRACKER:
        (tmp_path / TRACKER).write_text("30")
    else:
        (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError) as refused:
        latest_iteration(tmp_path)
    assert all(part in user_message(refused.value) for part in (name, "OUTPUT_BASEPATH", "checksums.json"))


def test_remains_at_position_22_are_about_that_position(tmp_path):
    (tmp_path / TRACKER).write_text("30")
    with pytest.raises(CheckpointError) as refused:
        weights_folder(tmp_path)
    said = user_message(refused.value)
    assert "position 22" in said and "give another checkpoint" in said and "OUTPUT_BASEPATH" not in said
