"""A checkpoint that is not what was saved is noticed before it is loaded, and the next whole one taken."""

import json
import os
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from distributed_runner import run_distributed
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from refusals import refused

from patch.checkpoint import latest_iteration, load_checkpoint, save_checkpoint, weights_folder
from patch.checkpoint.folder import iteration_folder
from patch.checkpoint.manifest import write_manifest
from patch.errors import CheckpointError
from patch.storage.checksums import Checksum


def state(value: float, rank: int = 0, world_size: int = 1) -> dict:
    tensor = torch.full((64, 16), value)
    return {
        "model": {"decoder.w": ShardedTensor.from_rank_offsets("decoder.w", tensor, (0, rank, world_size))}
    }


def save_three(root: Path, rank: int = 0, world_size: int = 1) -> None:
    for iteration in (1, 2, 3):
        common = {"iteration": iteration}
        save_checkpoint(root, iteration, state(float(iteration), rank, world_size), common)


@pytest.fixture
def root(one_process: None, tmp_path: Path) -> Path:
    """Three checkpoints, whose files have the same names and lengths."""
    save_three(tmp_path)
    return tmp_path


def data(folder: Path) -> Path:
    return folder / "__0_0.distcp"


def flip(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 4
    path.write_bytes(contents)


def become(make: Callable[[Path], object], path: Path) -> None:
    path.unlink()
    make(path)


def replace_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("iter_0000002"), folder)


UNFIT: dict[str, tuple[Callable[[Path], object], str]] = {
    "other folder": (replace_folder, "was written for iteration 2, not for iter_0000003"),
    "manifest of numbers": (
        lambda folder: (folder / "checksums.json").write_text("7"),
        "checksums.json is no list of checksums",
    ),
    "manifest of no files": (
        lambda folder: write_manifest(folder, 3, {}),
        "checksums.json lists no files",
    ),
    "manifest of a rank of 5000 digits": (
        lambda folder: write_manifest(folder, 3, {f"__{'1' * 5000}_0": Checksum(0, "0" * 8)}),
        "_0 cannot be read: File name too long",
    ),
    "manifest of deep values": (
        lambda folder: (folder / "checksums.json").write_text("[" * 100_000),
        "checksums.json is no list of checksums",
    ),
    "manifest that is a pipe": (
        lambda folder: become(os.mkfifo, folder / "checksums.json"),
        "checksums.json cannot be read: it is a pipe or a device",
    ),
    "manifest that is a device": (
        lambda folder: become(lambda path: path.symlink_to("/dev/null"), folder / "checksums.json"),
        "checksums.json cannot be read: it is a pipe or a device",
    ),
    "data that is a pipe": (
        lambda folder: become(os.mkfifo, data(folder)),
        "__0_0.distcp has 0 bytes, expected",
    ),
}  # fmt: skip
"""What is not a file with other bytes, see SPOILED: how it comes about and what is said."""


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", UNFIT)
def test_damaged_checkpoint_gives_way_to_the_next_whole_one(root, kind, caplog):
    spoil, said = UNFIT[kind]
    newest = iteration_folder(root, 3)
    spoil(newest)
    assert latest_iteration(root) == 2
    assert said in caplog.text and "iteration 2 is taken instead" in caplog.text
    for load in (newest, root):  # who only reads weights would take others than he thinks
        with pytest.raises(CheckpointError, match="not what was saved"):
            weights_folder(load)
    assert weights_folder(iteration_folder(root, 2)) == iteration_folder(root, 2)
    save_checkpoint(root, 3, state(3.0), {"iteration": 3})
    assert latest_iteration(root) == 3


def test_nothing_whole_is_an_error_that_names_the_newest(root):
    for iteration in (1, 2, 3):
        flip(data(iteration_folder(root, iteration)))
    with refused(CheckpointError, match=r"OUTPUT_BASEPATH.*iter_0000003/__0_0\.distcp has CRC-32 "):
        latest_iteration(root)


def test_whole_one_beside_a_damaged_tracked_one_may_be_newer(root):
    (root / "latest_checkpointed_iteration.txt").write_text("2\n")
    assert latest_iteration(root) == 2
    flip(data(iteration_folder(root, 2)))
    assert latest_iteration(root) == 3


def test_further_files_are_no_damage_and_a_folder_without_checksums_is_none_of_ours(root):
    newest = iteration_folder(root, 3)
    (newest / "notes.txt").write_text("mine")
    assert latest_iteration(root) == 3
    (newest / "checksums.json").unlink()
    assert latest_iteration(root) == 2 and weights_folder(newest) == newest


def test_every_file_has_its_checksum(root):
    newest = iteration_folder(root, 3)
    files = json.loads((newest / "checksums.json").read_text())["files"]
    expected = {
        path.name: {"length": path.stat().st_size, "crc32": f"{zlib.crc32(path.read_bytes()):08x}"}
        for path in newest.iterdir()
        if path.name != "checksums.json"
    }
    assert files == expected and data(newest).name in files


DATA_FILES = ("__0_0.distcp", "__0_1.distcp", "__1_0.distcp", "__1_1.distcp")
SAME_IN_BOTH = (".metadata", "metadata.json")
"""Files that have the same bytes in both checkpoints."""
FILES = (*DATA_FILES, *SAME_IN_BOTH, "checksums.json", "common.pt")


def save_wide(rank: int, world_size: int, folder: str) -> None:
    """Two checkpoints of two ranks with two files each."""
    from patch import compat

    compat.apply(cuda=False)
    torch.manual_seed(rank)
    for iteration in (1, 2):
        shards = {
            name: ShardedTensor.from_rank_offsets(name, torch.rand(4, 16), (0, rank, world_size))
            for name in ("decoder.a", "decoder.b")
        }
        save_checkpoint(Path(folder), iteration, {"model": shards}, {"iteration": iteration})


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    run_distributed(save_wide, 2, str(folder))
    assert sorted(path.name for path in (folder / "iter_0000002").iterdir()) == sorted(FILES)
    return folder


def _changed_byte(path: Path) -> None:
    generator = random.Random(path.name)
    contents = bytearray(path.read_bytes())
    contents[generator.randrange(len(contents))] ^= generator.randrange(1, 256)
    path.write_bytes(contents)


def _other_rank(path: Path) -> None:
    other = {"0": "1", "1": "0"}[path.name[2]]
    shutil.copy(path.with_name(f"__{other}{path.name[3:]}"), path)


SPOILED: dict[str, Callable[[Path], object]] = {
    "byte": _changed_byte,
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "missing": lambda path: path.unlink(),
    "other iteration": lambda path: shutil.copy(path.parent.with_name("iter_0000001") / path.name, path),
    "other rank": _other_rank,
}  # fmt: skip


CASES = [
    (kind, name)
    for kind in SPOILED
    for name in FILES
    if not (kind == "other rank" and name not in DATA_FILES)
    and not (kind == "other iteration" and name in SAME_IN_BOTH)
]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_whatever_happens_to_a_file_it_is_named(wide, tmp_path, kind, name, caplog):
    root = shutil.copytree(wide, tmp_path / "root")
    path = iteration_folder(root, 2) / name
    SPOILED[kind](path)
    assert latest_iteration(root) == 1
    assert f"DAMAGED CHECKPOINT: {path} " in caplog.text and "iteration 1 is taken instead" in caplog.text


def verify_together(rank: int, world_size: int, folder: str) -> tuple[list[str], int | None, float]:
    """The files that this rank has read, the iteration that was found, and its weight."""
    import torch.distributed as dist

    from patch import compat
    from patch.checkpoint import manifest

    compat.apply(cuda=False)
    root, read, difference = Path(folder), [], manifest.difference

    def noted(path: Path, expected: manifest.Checksum) -> str | None:
        read.append(f"{path.parent.name}/{path.name}")
        return difference(path, expected)

    manifest.difference = noted
    save_three(root, rank, world_size)
    if rank == 0:
        flip(iteration_folder(root, 3) / "__1_0.distcp")
    dist.barrier()
    found = latest_iteration(root)
    target = state(0.0, rank, world_size)
    load_checkpoint(root, found, target)
    return read, found, float(target["model"]["decoder.w"].data.mean())


def test_ranks_share_the_reading_and_agree(tmp_path):
    (first, *ours), (second, *theirs) = run_distributed(verify_together, 2, str(tmp_path))
    assert ours == theirs == [2, 2.0]
    names = ("__0_0.distcp", "__1_0.distcp", ".metadata", "common.pt", "metadata.json")
    whole = [name for name in [*first, *second] if name.startswith("iter_0000002")]
    assert sorted(whole) == sorted(f"iter_0000002/{name}" for name in names)
    assert all(any(name.startswith("iter_0000002") for name in read) for read in (first, second))
