"""checksums.json: lengths and checksums of a checkpoint's files when they were saved, and its iteration.

It is written last and published with the files. Converted checkpoints and those of other programs have none.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist

from patch.distributed.collectives import all_gather_object, from_rank_0
from patch.storage.checksums import Content, content, difference, from_json, to_json
from patch.storage.names import CHECKSUMS_FILE, iteration_name

_PREFIX = "iter_"


def contents_of_rank(folder: Path, rank: int) -> dict[str, Content]:
    """Lengths and checksums of the data files that a rank has written.

    Raises:
        OSError: a file cannot be read.
    """
    return {path.name: content(path) for path in folder.glob(f"__{rank}_*")}


def write_manifest(folder: Path, iteration: int, contents: dict[str, Content]) -> None:
    """Write checksums.json, the last file of a checkpoint.

    Args:
        folder: the checkpoint with all other files.
        iteration: its iteration.
        contents: lengths and checksums of all ranks' data files; those of the other files are computed here.
    Raises:
        OSError: a file cannot be read or written.
    """
    contents |= {path.name: content(path) for path in folder.iterdir() if path.name not in contents}
    manifest = {"iteration": iteration, "files": to_json(contents)}
    (folder / CHECKSUMS_FILE).write_text(json.dumps(manifest, indent=1) + "\n", encoding="ascii")


def damage(folder: Path) -> str | None:
    """How the folder differs from what was saved, in words; None if it does not, or has no checksums.json.

    In a job this is a collective: rank 0 reads checksums.json, and each rank checks a share of the files.
    """
    files = from_rank_0(lambda: read_manifest(folder))
    if not isinstance(files, dict):
        return files
    is_job = dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if is_job else (0, 1)
    files_of_rank = sorted(files.items())[rank::world_size]
    differences = (difference(folder / name, saved) for name, saved in files_of_rank)
    complaint = next(filter(None, differences), None)
    return next(filter(None, all_gather_object(complaint) if is_job else [complaint]), None)


def has_saved_lengths(folder: Path) -> bool:
    """Whether the folder has checksums.json and the files that it names, as long as they were."""
    files = read_manifest(folder)
    try:
        return isinstance(files, dict) and all(
            (folder / name).stat().st_size == saved.length for name, saved in files.items()
        )
    except OSError:
        return False


def read_manifest(folder: Path) -> dict[str, Content] | str | None:
    """The files' contents by name; or what is wrong with checksums.json, in words; None if it is missing."""
    path = folder / CHECKSUMS_FILE
    try:
        manifest = json.loads(path.read_text(encoding="ascii"))
        files = from_json(manifest["files"])
        iteration = int(manifest["iteration"])
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        return f"{path} is no list of checksums: {type(error).__name__}"
    if any(Path(name).name != name or not name.isprintable() for name in files):
        return f"{path} names a file outside of its folder"
    if folder.name.startswith(_PREFIX) and folder.name != iteration_name(iteration):
        return f"{path} was written for iteration {iteration}, not for {folder.name}"
    return files
