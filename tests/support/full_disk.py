"""Disks that fill up while a test writes to them."""

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def disk_full_after(limit: int) -> Iterator[None]:
    """Let this process write no file longer than `limit` bytes, as on a disk that fills up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class SmallDisk:
    """A file system in memory, with files that fill it."""

    def __init__(self, mount_point: Path) -> None:
        self._mount_point, self._ballast = mount_point, mount_point / "ballast"
        self.folder = mount_point / "data"
        """Folder for the test's files; the test creates it."""

    def leave(self, *, pages: int | None = None, files: int | None = None) -> None:
        """Fill the file system except this number of pages, or of file names."""
        self._ballast.mkdir()
        if files is not None:
            for number in range(os.statvfs(self._mount_point).f_ffree - files):
                (self._ballast / str(number)).touch()
        if pages is not None:
            room = os.statvfs(self._mount_point)
            with suppress(OSError):  # a background save has meanwhile taken the rest
                (self._ballast / "bytes").write_bytes(bytes((room.f_bavail - pages) * room.f_bsize))

    def free(self) -> None:
        for path in self._ballast.iterdir():
            path.unlink()
        self._ballast.rmdir()


@contextmanager
def small_disk(mount_point: Path, *, num_bytes: int, num_files: int) -> Iterator[SmallDisk]:
    """Mount a file system of this size in memory. Without permission to mount, the test is skipped."""
    options = f"size={num_bytes},nr_inodes={num_files}"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(mount_point)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    try:
        yield SmallDisk(mount_point)
    finally:
        subprocess.run(["umount", "--lazy", str(mount_point)], check=True)
