"""checksums.json: what the files of a checkpoint held when they were saved, and which iteration that was.

It is written last and published with them. Converted checkpoints and those of other programs have none.
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
    """What the data files hold that this rank has written.

    Raises:
        OSError: one cannot be read.
    """
    return {path.name: content(path) for path in folder.glob(f"__{rank}_*")}


def write_manifest(folder: Path, iteration: int, contents: dict[str, Content]) -> None:
    """Write the manifest of a folder that is complete but for it.

    Args:
        contents: of all ranks' data files; those of the other files are read here.
    Raises:
        OSError: a file cannot be read or written.
    """
    contents |= {path.name: content(path) for path in folder.iterdir() if path.name not in contents}
    manifest = {"iteration": iteration, "files": to_json(contents)}
    (folder / CHECKSUMS_FILE).write_text(json.dumps(manifest, indent=1) + "\n", encoding="ascii")


def damage(folder: Path) -> str | None:
    """What shows that the folder is not what was saved; None where nothing does, or there is no manifest.

    In a job a collective that each rank reads a share of the files for; rank 0's manifest is the one.
    """
    files = from_rank_0(lambda: _read(folder))
    if not isinstance(files, dict):
        return files
    is_job = dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if is_job else (0, 1)
    mine = sorted(files.items())[rank::world_size]
    complaint = next(filter(None, (difference(folder / name, held) for name, held in mine)), None)
    return next(filter(None, all_gather_object(complaint) if is_job else [complaint]), None)


def _read(folder: Path) -> dict[str, Content] | str | None:
    """What the files held; or what is wrong with the manifest; or None without one."""
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
