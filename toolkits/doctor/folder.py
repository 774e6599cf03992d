"""The file system where checkpoints would be written: its kind, room, speed, locks, clock."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from patch.errors import ConfigError
from patch.numbers import size_text
from patch.storage.atomic import write_atomically
from patch.storage.lock import hold_run
from patch.storage.places import IN_MEMORY, file_system_of
from toolkits.doctor.check import Finding, Settings, graded

_FILE_BYTES = 256 << 20
_BLOCK_BYTES = 8 << 20
_NUM_SMALL = 20
_BYTES_8B = 8.03e9 * 14
"""Bytes of a checkpoint of LLaMA-3.1 8B: 2 bytes for a parameter's weight, 12 for its optimizer states."""
_SLOW_BYTES_PER_S = 100e6
_SLOW_SMALL_S = 0.05
_MAX_SKEW_S = 30.0


def check_folder(settings: Settings) -> Iterator[Finding]:
    """Room, kind and speed of --folder, by a file of 256 MiB (at most a tenth of the room)."""
    try:
        with TemporaryDirectory(prefix=".doctor-", dir=settings.folder) as name:
            yield from _check(Path(name))
    except OSError as error:
        what = f"cannot be written to: {error.strerror}"
        yield Finding("file system", "broken", what, "give another --folder")


def _check(folder: Path) -> Iterator[Finding]:
    """The findings of an empty folder."""
    skew = folder.stat().st_mtime - time.time()
    kind, free = file_system_of(folder.resolve()), shutil.disk_usage(folder).free
    is_memory = kind in IN_MEMORY
    yield graded("file system", kind, is_memory, "it is lost with the machine: give --folder of a disk")
    what = f"{size_text(free)}, {free / _BYTES_8B:.1f} checkpoints of an 8B model with optimizer states"
    cure = "make room, or --save-retain-last 1 with --save-weights-only-at-end"
    yield graded("free space", what, free < _BYTES_8B, cure, free_bytes=free)
    yield from _speeds(folder / "large", min(_FILE_BYTES, free // 10))
    yield _lock(folder)
    begin = time.perf_counter()
    for _ in range(_NUM_SMALL):
        write_atomically(folder / "small", "x")  # as a save publishes itself
    seconds = (time.perf_counter() - begin) / _NUM_SMALL
    what, cure = f"{seconds * 1e3:.1f} ms each", "a network file system under load? saves take longer"
    yield graded("small files", what, seconds > _SLOW_SMALL_S, cure, seconds=seconds)
    what = f"{abs(skew):.1f} s {'before' if skew > 0 else 'behind'} this machine's"
    cure = "synchronize the clocks (chrony, ntp): locks of runs and stores go by them"
    yield graded("its clock", what, abs(skew) > _MAX_SKEW_S, cure, skew_s=skew)


def _speeds(file: Path, num_bytes: int) -> Iterator[Finding]:
    """Bytes a second to the disk, and from it when the kernel was asked to forget the file."""
    block = secrets.token_bytes(_BLOCK_BYTES)  # what file systems cannot compress
    begin = time.perf_counter()
    with file.open("wb", buffering=0) as out:
        for _ in range(max(1, num_bytes // _BLOCK_BYTES)):
            out.write(block)
        os.fsync(out.fileno())
    speed = num_bytes / (time.perf_counter() - begin)
    seconds = _BYTES_8B / speed
    what = f"{speed / 1e9:.2f} GB/s from one process, with fsync: {seconds:.0f} s for an 8B checkpoint"
    cure = "save rarely, or to a faster folder; background saves need host memory for a copy"
    yield graded("writing", what, speed < _SLOW_BYTES_PER_S, cure, bytes_per_s=speed)
    with file.open("rb", buffering=0) as source:
        os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begin = time.perf_counter()
        while source.read(_BLOCK_BYTES):
            pass
    speed = num_bytes / (time.perf_counter() - begin)
    yield Finding("reading", "ok", f"{speed / 1e9:.2f} GB/s from one process", data={"bytes_per_s": speed})


def _lock(folder: Path) -> Finding:
    """Whether a second run is kept out of a run's folder."""
    with hold_run(folder):
        try:
            with hold_run(folder):
                pass
        except ConfigError:
            return Finding("locks", "ok", "a second run is refused")
    cure = "do not start two runs in one folder there: nothing may notice"
    return Finding("locks", "warning", "a second run is not refused", cure)
