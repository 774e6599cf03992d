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
import torch.distributed as dist
from distributed_runner import run_distributed
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from patch import compat
from patch.checkpoint import latest_iteration, load_checkpoint, manifest, save_checkpoint, weights_folder
from patch.checkpoint.folder import iteration_folder
from patch.checkpoint.manifest import write_manifest
from patch.compat.checkpoint_format import COMMON_IS_OBJECT
from patch.errors import CheckpointError
from patch.storage.checksums import Checksum
from patch.storage.names import COMMON_FILE, COMMON_KEY, is_complete

DATA_FILES = ("__0_0.distcp", "__0_1.distcp", "__1_0.distcp", "__1_1.distcp")
SAME_IN_BOTH = (".metadata", "metadata.json")
"""Files that have the same bytes in both checkpoints."""
COMMON = () if COMMON_IS_OBJECT else ("common.pt",)
FILES = (*DATA_FILES, *SAME_IN_BOTH, "checksums.json", *COMMON)


def state(rank: int, world_size: int, seed: int) -> dict:
    """Random shards of two tensors."""
    torch.manual_seed(10 * seed + rank)
    shards = {
        name: ShardedTensor.from_rank_offsets(name, torch.rand(4, 16), (0, rank, world_size))
        for name in ("decoder.a", "decoder.b")
    }
    return {"model": shards}


def save_two(rank: int, world_size: int, folder: str) -> None:
    compat.apply(cuda=False)
    for iteration in (1, 2):
        save_checkpoint(
            Path(folder), iteration, state(rank, world_size, iteration), {"iteration": iteration}
        )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of two ranks with two files each, whose files have the same names and lengths."""
    folder = tmp_path_factory.mktemp("saved")
    run_distributed(save_two, 2, str(folder))
    assert sorted(path.name for path in (folder / "iter_0000002").iterdir()) == sorted(FILES)
    return folder


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "root")


def changed_byte(path: Path) -> None:
    generator = random.Random(path.name)
    contents = bytearray(path.read_bytes())
    contents[generator.randrange(len(contents))] ^= generator.randrange(1, 256)
    path.write_bytes(contents)


def other_rank(path: Path) -> None:
    other = {"0": "1", "1": "0"}[path.name[2]]
    shutil.copy(path.with_name(f"__{other}{path.name[3:]}"), path)


SPOILED: dict[str, Callable[[Path], object]] = {
    "byte": changed_byte,
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "missing": lambda path: path.unlink(),
    "other iteration": lambda path: shutil.copy(path.parent.with_name("iter_0000001") / path.name, path),
    "other rank": other_rank,
}  # fmt: skip


CASES = [
    (kind, name)
    for kind in SPOILED
    for name in FILES
    if not (kind == "other rank" and name not in DATA_FILES)
    and not (kind == "other iteration" and name in SAME_IN_BOTH)
]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_whatever_happens_to_a_file_it_is_named(root, kind, name, caplog):
    path = iteration_folder(root, 2) / name
    SPOILED[kind](path)
    assert latest_iteration(root) == 1
    assert f"DAMAGED CHECKPOINT: {path} " in caplog.text and "iteration 1 is taken instead" in caplog.text


def become(make: Callable[[Path], object], path: Path) -> None:
    path.unlink()
    make(path)


def other_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("iter_0000001"), folder)


UNFIT: dict[str, tuple[Callable[[Path], object], str]] = {
    "other folder": (other_folder, "was written for iteration 1, not for iter_0000002"),
    "manifest of numbers": (
        lambda folder: (folder / "checksums.json").write_text("7"),
        "checksums.json is damaged",
    ),
    "manifest of no files": (
        lambda folder: write_manifest(folder, 2, {}),
        "checksums.json lists no files",
    ),
    "manifest of a rank of 5000 digits": (
        lambda folder: write_manifest(folder, 2, {f"__{'1' * 5000}_0": Checksum(0, "0" * 8)}),
        "_0 cannot be read: File name too long",
    ),
    "manifest of deep values": (
        lambda folder: (folder / "checksums.json").write_text("[" * 100_000),
        "checksums.json is damaged",
    ),
    "manifest that is a pipe": (
        lambda folder: become(os.mkfifo, folder / "checksums.json"),
        "checksums.json cannot be read: it is a pipe or a device",
    ),
    "data that is a pipe": (
        lambda folder: become(os.mkfifo, folder / "__0_0.distcp"),
        "__0_0.distcp has 0 bytes, expected",
    ),
}  # fmt: skip
"""What is not a file with other bytes, see SPOILED: how it comes about and what is said."""


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", UNFIT)
def test_damaged_checkpoint_gives_way_to_the_next_whole_one(root, kind, caplog):
    spoil, said = UNFIT[kind]
    newest = iteration_folder(root, 2)
    spoil(newest)
    assert latest_iteration(root) == 1
    assert said in caplog.text and "iteration 1 is taken instead" in caplog.text
    for load in (newest, root):  # who only reads weights would take others than he thinks
        with pytest.raises(CheckpointError, match="not what was saved"):
            weights_folder(load)
    assert weights_folder(iteration_folder(root, 1)) == iteration_folder(root, 1)


def test_whole_one_beside_a_damaged_tracked_one_may_be_newer(root):
    (root / "latest_checkpointed_iteration.txt").write_text("1\n")
    assert latest_iteration(root) == 1
    changed_byte(iteration_folder(root, 1) / "__0_0.distcp")
    assert latest_iteration(root) == 2


def test_further_files_are_no_damage_and_a_folder_without_checksums_is_none_of_ours(root):
    newest = iteration_folder(root, 2)
    (newest / "notes.txt").write_text("mine")
    assert latest_iteration(root) == 2
    (newest / "checksums.json").unlink()
    assert latest_iteration(root) == 1 and weights_folder(newest) == newest


@pytest.mark.parametrize(
    ("named", "index", "is_whole"),
    [(COMMON_FILE, COMMON_KEY, False), ("x", "", True), (None, COMMON_KEY, True), (None, "", False)],
)
def test_a_checkpoint_without_common_pt_is_whole_if_its_list_or_its_index_says_so(
    tmp_path, named, index, is_whole
):
    (tmp_path / "metadata.json").touch()
    (tmp_path / ".metadata").write_text(index)
    if named is not None:
        write_manifest(tmp_path, 1, {named: Checksum(0, 0)})
    assert is_complete(tmp_path) is is_whole


def test_every_file_has_its_checksum(saved):
    newest = iteration_folder(saved, 2)
    assert json.loads((newest / "checksums.json").read_text())["files"] == {
        path.name: {"length": path.stat().st_size, "crc32": f"{zlib.crc32(path.read_bytes()):08x}"}
        for path in newest.iterdir()
        if path.name != "checksums.json"
    }


def verify_together(rank: int, world_size: int, root: Path) -> tuple[list[str], int | None, bool]:
    """The files that this rank has read, the iteration that was found, and whether its values came."""
    compat.apply(cuda=False)
    read, difference = [], manifest.difference

    def noted(path: Path, expected: manifest.Checksum) -> str | None:
        read.append(f"{path.parent.name}/{path.name}")
        return difference(path, expected)

    manifest.difference = noted
    if rank == 0:
        changed_byte(iteration_folder(root, 2) / "__1_0.distcp")
    dist.barrier()
    found = latest_iteration(root)
    target = state(rank, world_size, 7)
    load_checkpoint(root, found, target)
    expected = state(rank, world_size, 1)["model"]
    return read, found, all(
        torch.equal(shard.data, expected[name].data) for name, shard in target["model"].items()
    )


def test_ranks_share_the_reading_and_agree(root):
    (first, *ours), (second, *theirs) = run_distributed(verify_together, 2, root)
    assert ours == theirs == [1, True]
    names = (*DATA_FILES, *SAME_IN_BOTH, *COMMON)
    whole = [name for name in [*first, *second] if name.startswith("iter_0000001")]
    assert sorted(whole) == sorted(f"iter_0000001/{name}" for name in names)
    assert all(any(name.startswith("iter_0000001") for name in read) for read in (first, second))
