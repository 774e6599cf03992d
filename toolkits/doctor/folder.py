"""The file system where checkpoints would be written: its kind, room, speed, locks, clock."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from patch.storage.sizes import size_text
from toolkits.doctor.check import Finding, Settings, graded

_FILE_BYTES = 256 << 20
_BLOCK_BYTES = 8 << 20
_NUM_SMALL = 20
_BYTES_8B = 8.03e9 * 14
"""Bytes of a checkpoint of LLaMA-3.1 8B: 2 bytes for a parameter's weight, 12 for its optimizer states."""
_SLOW_BYTES_PER_S = 100e6
_SLOW_SMALL_S = 0.05
_MAX_SKEW_S = 30.0
_IN_MEMORY = ("tmpfs", "ramfs")


def check_folder(settings: Settings) -> Iterator[Finding]:
    """Room, kind and speed of --folder, by a file of 256 MiB (at most a tenth of the room)."""
    folder = settings.folder
    try:
        with _temporary(folder) as file:
            file.touch()
            skew = file.stat().st_mtime - time.time()
    except OSError as error:
        what = f"cannot be written to: {error.strerror}"
        yield Finding("file system", "broken", what, "give another --folder")
        return
    kind, free = file_system_of(folder.resolve(), Path("/proc/self/mounts")), shutil.disk_usage(folder).free
    is_memory = kind in _IN_MEMORY
    yield graded("file system", kind, is_memory, "it is lost with the machine: give --folder of a disk")
    is_full = free < _BYTES_8B
    what = f"{size_text(free)}, {free / _BYTES_8B:.1f} checkpoints of an 8B model with optimizer states"
    cure = "make room, or --save-retain-last 1 with --save-weights-only-at-end"
    yield graded("free space", what, is_full, cure, free_bytes=free)
    num_bytes = min(_FILE_BYTES, free // 10)
    with _temporary(folder) as file:
        yield from _speeds(file, num_bytes)
        yield _lock(file)
    yield _small_files(folder)
    what = f"{abs(skew):.1f} s {'before' if skew > 0 else 'behind'} this machine's"
    cure = "synchronize the clocks (chrony, ntp): locks of runs and stores go by them"
    yield graded("its clock", what, abs(skew) > _MAX_SKEW_S, cure, skew_s=skew)


def file_system_of(folder: Path, mounts: Path) -> str:
    """The kind of file system that a folder is on.

    Args:
        folder: an absolute path.
        mounts: the file in which Linux lists what is mounted where.
    """
    found, longest = "unknown", -1
    for line in mounts.read_text().splitlines():
        _, place, kind, *_ = line.split()
        place = place.replace("\\040", " ")
        if folder.is_relative_to(place) and len(place) >= longest:
            found, longest = kind, len(place)
    return found


def _speeds(file: Path, num_bytes: int) -> Iterator[Finding]:
    seconds = _write(file, num_bytes)
    speed = num_bytes / seconds
    checkpoint_s = _BYTES_8B / speed
    what = f"{speed / 1e9:.2f} GB/s from one process, with fsync: {checkpoint_s:.0f} s for an 8B checkpoint"
    cure = "save rarely, or to a faster folder; background saves need host memory for a copy"
    yield graded("writing", what, speed < _SLOW_BYTES_PER_S, cure, bytes_per_s=speed)
    speed = num_bytes / _read(file)
    yield Finding("reading", "ok", f"{speed / 1e9:.2f} GB/s from one process", data={"bytes_per_s": speed})


def _write(file: Path, num_bytes: int) -> float:
    """Seconds to write a file and to have it on the disk."""
    block = secrets.token_bytes(_BLOCK_BYTES)  # what file systems cannot compress
    begin = time.perf_counter()
    with file.open("wb", buffering=0) as out:
        for _ in range(max(1, num_bytes // _BLOCK_BYTES)):
            out.write(block)
        os.fsync(out.fileno())
    return time.perf_counter() - begin


def _read(file: Path) -> float:
    """Seconds to read a file that the kernel was asked to forget."""
    with file.open("rb", buffering=0) as source:
        os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begin = time.perf_counter()
        while source.read(_BLOCK_BYTES):
            pass
        return time.perf_counter() - begin


def _lock(file: Path) -> Finding:
    """Whether two opens of a file exclude each other, which keeps two runs out of one folder."""
    with file.open("rb+") as first, file.open("rb+") as second:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return Finding("locks", "ok", f"no flock here ({error.strerror}): runs create files instead")
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return Finding("locks", "ok", "flock works")
    cure = "do not start two runs in one folder there: nothing may notice"
    return Finding("locks", "warning", "flock succeeds twice", cure)


def _small_files(folder: Path) -> Finding:
    """Time of a small file, with fsync and a rename: a save publishes itself by such files."""
    begin = time.perf_counter()
    for _ in range(_NUM_SMALL):
        with _temporary(folder) as file:
            with file.open("wb") as out:
                out.write(b"x")
                os.fsync(out.fileno())
            file.rename(file.with_suffix(".renamed"))
            file.with_suffix(".renamed").unlink()
    seconds = (time.perf_counter() - begin) / _NUM_SMALL
    cure = "a network file system under load? saves take longer"
    what = f"{seconds * 1e3:.1f} ms each"
    return graded("small files", what, seconds > _SLOW_SMALL_S, cure, seconds=seconds)


@contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    file = folder / f".doctor-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        yield file
    finally:
        file.unlink(missing_ok=True)
