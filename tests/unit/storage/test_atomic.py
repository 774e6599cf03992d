"""Files and folders appear whole or not at all, on a full disk and across file systems too."""

import errno
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from full_disk import disk_full_after

from patch.storage.atomic import StagedFolder, write_atomically


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that are written to the disk, in order."""
    paths, fsync = [], os.fsync

    def watched(descriptor: int) -> None:
        paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    return paths


def staged(folder: Path, partial: Path | None = None) -> StagedFolder:
    return StagedFolder(folder / "target", partial or folder / "partial", folder / "replaced")


@pytest.mark.parametrize("content", ["caf\u00e9\n", b"\x00\xff"])
def test_file_is_replaced_and_nothing_else_is_left(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("old")
    write_atomically(path, content)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
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


def test_staged_folder_begins_empty_and_replaces_the_target(
    tmp_path: Path, synced: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = staged(tmp_path)
    for path in (folder.target, folder.partial, folder.replaced):
        path.mkdir()
        (path / "old").touch()
    folder.open()
    assert not os.listdir(folder.partial) and str(folder.partial) in caplog.text
    (folder.partial / "below").mkdir()
    (folder.partial / "below" / "new").touch()
    folder.publish()
    assert os.listdir(tmp_path) == ["target"] and os.listdir(folder.target) == ["below"]
    parts = ("below", "below/new", "")
    assert sorted(synced[:-1]) == sorted(str(folder.partial / part) for part in parts)
    assert synced[-1] == str(tmp_path)


def test_older_target_comes_back_where_the_new_one_cannot_take_its_name(tmp_path: Path) -> None:
    with TemporaryDirectory(dir="/dev/shm") as elsewhere:
        if os.stat(elsewhere).st_dev == tmp_path.stat().st_dev:
            pytest.skip("one file system holds both")
        folder = staged(tmp_path, Path(elsewhere) / "partial")
        folder.target.mkdir()
        (folder.target / "old").touch()
        folder.open()
        with pytest.raises(OSError) as refused:
            folder.publish()
        assert refused.value.errno == errno.EXDEV
        assert os.listdir(tmp_path) == ["target"] and os.listdir(folder.target) == ["old"]
        folder.discard()
        assert not folder.partial.exists()
