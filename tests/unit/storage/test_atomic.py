"""Files appear whole or not at all, also on a full disk, and a long one goes there while it is written."""

import errno
import os
import zlib
from pathlib import Path

import pytest
from full_disk import disk_full_after

from patch.storage import places
from patch.storage.atomic import write_atomically
from patch.storage.checksums import Checksum, SummedFile, content


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that are written to the disk, in order."""
    paths, fsync = [], os.fsync

    def watched(descriptor: int) -> None:
        paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    return paths


@pytest.mark.parametrize("text", ["caf\u00e9\n", b"\x00\xff"])
def test_file_is_replaced_and_nothing_else_is_left(tmp_path: Path, text: str | bytes) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("old")
    write_atomically(path, text)
    assert path.read_bytes() == (text.encode() if isinstance(text, str) else text)
    assert os.listdir(tmp_path) == ["config.yaml"]


def test_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("old")
    with disk_full_after(1024), pytest.raises(OSError) as refused:
        write_atomically(path, b"x" * 4096)
    assert refused.value.errno == errno.EFBIG
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["config.yaml"]


def test_bytes_of_a_file_are_on_the_disk_before_it_has_its_name(tmp_path: Path, synced: list[str]) -> None:
    write_atomically(tmp_path / "a", "x")
    draft, folder = synced
    assert draft == str(tmp_path / "a.tmp") and folder == str(tmp_path)


def test_disk_begins_to_write_a_long_file_before_it_is_finished(tmp_path: Path, monkeypatch) -> None:
    flushed: list[int] = []
    flush = places._sync_file_range
    monkeypatch.setattr(places, "_sync_file_range", lambda *flushing: flushed.append(flush(*flushing)))
    file = SummedFile(tmp_path / "data")
    part = bytes(9 * 2**20)
    for _ in range(4):
        file.write(part)
    assert flushed == [0, 0]  # after 16 and 32 MiB
    written = file.finish()
    assert written == content(tmp_path / "data") == Checksum(4 * len(part), f"{zlib.crc32(4 * part):08x}")
