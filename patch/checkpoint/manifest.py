"""checksums.json: iteration of a checkpoint, and lengths and checksums of its files.

It is written last, so it marks a complete checkpoint. Its last value is the checksum of the rest. Checkpoints
of other programs have none.
"""

from __future__ import annotations

import json
import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist

from patch.device import device_setter
from patch.distributed.collectives import all_gather_object, fail_together, from_rank_0
from patch.errors import CheckpointError
from patch.storage.atomic import sync
from patch.storage.checksums import Checksum, difference, from_json, to_json
from patch.storage.names import CHECKSUMS_FILE, iteration_name
from patch.storage.places import AnyPath, file_sizes
from patch.storage.remote import RemotePath
from patch.storage.text_files import parse_json, read_small
from patch.text import to_int

_OWN = "crc32"
_NUM_THREADS = 2


def write_manifest(folder: AnyPath, iteration: int, contents: dict[str, Checksum]) -> None:
    """Write checksums.json, the last file of a checkpoint, and sync it to the disk.

    Args:
        contents: lengths and checksums of all other files.
    Raises:
        OSError: the file cannot be written.
    """
    manifest = {"iteration": iteration, "files": to_json(contents)}
    path = folder / CHECKSUMS_FILE
    path.write_bytes(_text({**manifest, _OWN: _own_checksum(manifest)}))
    if isinstance(path, Path):
        sync(path)


def is_marked(folder: AnyPath) -> bool:
    """Return whether the folder has our marker of a complete checkpoint, readable or not."""
    return (folder / CHECKSUMS_FILE).exists()


def damage(folder: AnyPath) -> str | None:
    """Return how the folder differs from what was saved, or None if it does not.

    In a job this is a collective: rank 0 reads checksums.json, and each rank checks the files of the same
    rank number. At the same layout it loads these files next, then from the page cache.

    Raises:
        CheckpointError: a store does not answer.
    """
    with fail_together(f"{folder} cannot be verified", CheckpointError):
        files = from_rank_0(lambda: read_manifest(folder))
    if files is None:
        missing = folder / CHECKSUMS_FILE
        return f"{missing} is missing: the checkpoint was not written to its end, or by another program"
    if not isinstance(files, dict):
        return files
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    names = [name for name in sorted(files) if _writer(name) % world_size == rank]
    with fail_together(f"{folder} cannot be verified", CheckpointError):
        with ThreadPoolExecutor(_NUM_THREADS, initializer=device_setter()) as pool:
            differences = list(pool.map(lambda name: difference(folder / name, files[name]), names))
    complaint = next(filter(None, differences), None)
    return next(filter(None, all_gather_object(complaint)), None)


def _writer(name: str) -> int:
    """Return the rank that wrote a file."""
    match = re.match(r"__(\d+)_", name)
    return to_int(match[1]) or 0 if match else 0


def _text(manifest: dict[str, Any]) -> bytes:
    return (json.dumps(manifest, indent=1) + "\n").encode("ascii")


def _own_checksum(manifest: dict[str, Any]) -> str:
    return f"{zlib.crc32(_text(manifest)):08x}"


def has_saved_lengths(folder: AnyPath) -> bool:
    """Return whether the folder has checksums.json, and all its files with their saved lengths."""
    try:
        files, lengths = read_manifest(folder), file_sizes(folder)
    except OSError:
        return False
    return isinstance(files, dict) and all(lengths.get(name) == saved.length for name, saved in files.items())


def read_manifest(folder: AnyPath) -> dict[str, Checksum] | str | None:
    """Return the checksums by file name, the fault of checksums.json as a text, or None if it is missing.

    Raises:
        OSError: a store does not answer.
    """
    path = folder / CHECKSUMS_FILE
    try:
        text = read_small(path)
        manifest = parse_json(text)
        own = manifest.pop(_OWN, "missing")
        files = from_json(manifest["files"])
        iteration = int(manifest["iteration"])
    except FileNotFoundError:
        return None
    except OSError as error:
        if isinstance(path, RemotePath):
            raise
        return f"{path} cannot be read: {error.strerror}"
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        return f"{path} is damaged ({type(error).__name__}), expected the checksums of the files"
    if text != _text({**manifest, _OWN: _own_checksum(manifest)}):
        return f"{path} has CRC-32 {_own_checksum(manifest)}, expected {own}"
    if not files:
        return f"{path} lists no files"
    if any(Path(name).name != name or not name.isprintable() for name in files):
        return f"{path} names a file outside of its folder"
    if folder.name.startswith("iter_") and folder.name != iteration_name(iteration):
        return f"{path} was written for iteration {iteration}, not for {folder.name}"
    return files
