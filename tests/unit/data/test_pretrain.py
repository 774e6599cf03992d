"""What is evaluated of a .bin/.idx, index files of a run, and damaged files."""

import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from distributed_runner import run_distributed
from indexed_sets import consecutive, write_set
from refusals import Payload
from small_runs import small_run

from patch.data.pretraining.dataset import PretrainSource, load_training, load_validation
from patch.data.pretraining.run_sets import PretrainOptions
from patch.errors import DataError

LENGTH = 8


def load(prefix: Path, is_train: bool = True) -> PretrainSource:
    run = small_run(seq_length=LENGTH, vocab_size=250)
    options = PretrainOptions(run.data, run.model, None, 1234, prefix.parent / "out" / "data_index")
    if not is_train:
        return load_validation(str(prefix), options)
    return load_training([str(prefix)], None, options, lambda one_pass: 12)


@pytest.mark.parametrize("sizes", [[4, 9, 7], [17], [3], [40], [16]])
def test_evaluation_learns_every_label_once(tmp_path: Path, sizes: list[int]) -> None:
    """The last sample is padded, and upstream would share one loss mask between all samples."""
    write_set(tmp_path / "set", consecutive(sizes))
    source = load(tmp_path / "set", is_train=False)
    total = sum(sizes)
    assert len(source) == -(-(total - 1) // LENGTH)
    padded_first = sorted(range(len(source)), key=lambda index: source[index].loss_mask.sum().item())
    learned: list[int] = []
    for index in padded_first:
        sample = source[index]
        assert (sample.tokens >= 0).all() and (sample.labels >= 0).all()
        learned += sample.labels[sample.loss_mask.bool()].tolist()
    assert len(learned) == total - 1 == len(set(learned))


def test_changed_data_of_the_same_size_is_indexed_anew(tmp_path: Path) -> None:
    """Ten documents become one, which the old index files would still look for ten of."""
    for age, sizes in enumerate(([10] * 10, [100])):
        write_set(tmp_path / "set", consecutive(sizes))
        os.utime(tmp_path / "set.bin", ns=(age, age))
        source = load(tmp_path / "set")
        samples = [source[index] for index in range(12)]
        assert all((sample.labels[:-1] == sample.tokens[1:]).all() for sample in samples)


def flip(path: Path) -> None:
    """Change one byte, as a disk might."""
    contents = bytearray(path.read_bytes())
    contents[-4] ^= 1
    path.write_bytes(contents)


@pytest.mark.parametrize(
    "damage",
    [
        flip,
        lambda file: os.truncate(file, file.stat().st_size - 8),
        lambda file: np.save(file, np.load(file)[:0]),
        lambda file: np.save(file, np.array([Payload(file.parent / "ran")])),
        lambda file: file.write_bytes(pickle.dumps(Payload(file.parent / "ran"))),
        lambda file: (file.parent / "checksums.json").unlink(),
        lambda file: (file.parent / "checksums.json").write_text("{"),
    ],
)
def test_changed_index_file_is_made_again_with_the_same_order(
    tmp_path: Path, damage, logged: list[str]
) -> None:
    """A pickle upstream would load, and run."""
    write_set(tmp_path / "set", consecutive([40, 60]))
    source = load(tmp_path / "set")
    expected = [source[index].tokens.tolist() for index in range(12)]
    (file,) = (tmp_path / "out" / "data_index").glob("*-train-shuffle_index.npy")
    damage(file)
    logged.clear()
    for _ in range(2):
        source = load(tmp_path / "set")
        assert [source[index].tokens.tolist() for index in range(12)] == expected
    assert sum(file.name in message and "made again" in message for message in logged) == 1
    assert not (file.parent / "ran").exists()


def test_index_files_of_both_sets_are_left_alone_while_they_are_whole(tmp_path: Path, logged: list) -> None:
    write_set(tmp_path / "set", consecutive([40, 60]))
    folder = tmp_path / "out" / "data_index"
    for is_train in (True, False, True, False):
        load(tmp_path / "set", is_train)
        times = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.npy")}
    load(tmp_path / "set")
    assert times == {path.name: path.stat().st_mtime_ns for path in folder.glob("*.npy")} and len(times) == 6
    assert not any("made again" in message for message in logged)


def write_index(
    prefix: Path, *, code: int = 4, lengths=(60, 40), pointers=None, documents=(0, 1, 2)
) -> None:
    """An .idx written by hand; without changes that of documents of 60 and 40 tokens."""
    if pointers is None:
        pointers = np.cumsum([0, *lengths])[:-1] * 4
    parts = [np.array(lengths, np.int32), np.array(pointers, np.int64), np.array(documents, np.int64)]
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(lengths), len(documents))
    Path(f"{prefix}.idx").write_bytes(header + b"".join(part.tobytes() for part in parts))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda p: os.remove(f"{p}.bin"), "bin: no such file.*llama-patch preprocess"),
        (lambda p: os.remove(f"{p}.idx"), "idx: no such file"),
        (lambda p: os.truncate(f"{p}.bin", 0), "bin: is empty"),
        (lambda p: os.truncate(f"{p}.bin", 100), "bin: 100 bytes, expected 400"),
        (lambda p: os.truncate(f"{p}.idx", 20), "idx: 20 bytes"),
        (lambda p: os.truncate(f"{p}.idx", 70), "idx: 70 bytes, expected 82"),
        (lambda p: Path(f"{p}.idx").write_bytes(b"x" * 62), "idx: is not a megatron-core index"),
        (lambda p: write_set(p, [[1]]), "bin: .*one token"),
        (lambda p: write_set(p, []), "bin: is empty"),
        (dict(documents=(0, 2, 1)), "idx: .*that do not begin at 0 or end at its 2 sequences"),
        (dict(documents=(0, 2, 1, 2)), "idx: .*a document that ends before it begins"),
        (dict(documents=()), "idx: .*no documents"),
        (dict(lengths=(), documents=(0,)), "bin: .*bytes, expected 0 by set.idx"),
        (dict(lengths=(110, -10)), "idx: .*a sequence of -10 tokens"),
        (dict(pointers=(0, 4000)), "idx: .*does not begin where the one before it ends"),
        (dict(code=6), r"idx: the dtype code is 6, expected an integer dtype \(1, 2, 3, 4, 5, 8\)"),
        (dict(code=5, pointers=(0, 480)), "bin: .*400 bytes, expected 800"),
    ],
)
def test_damaged_set_is_refused_with_the_file(tmp_path: Path, damage, said: str) -> None:
    prefix = tmp_path / "set"
    write_set(prefix, consecutive([60, 40]))
    write_index(prefix, **damage) if isinstance(damage, dict) else damage(prefix)
    with pytest.raises(DataError, match=rf"^{prefix}\.{said}"):
        load(prefix)


@pytest.mark.parametrize("first", [-1, -(2**31), 250])
@pytest.mark.parametrize("checked", [1, 1 << 24])
def test_id_without_an_embedding_is_refused(tmp_path: Path, monkeypatch, first: int, checked: int) -> None:
    """Upstream pads with -1 by default, and would take one in the data for padding."""
    monkeypatch.setattr("patch.data.pretraining.run_sets._TOKENS_CHECKED", checked)
    prefix = tmp_path / "set"
    write_set(prefix, consecutive([60, 40]))
    tokens = np.fromfile(f"{prefix}.bin", np.int32)
    tokens[50] = first
    tokens.tofile(f"{prefix}.bin")
    with pytest.raises(DataError, match=f"token id {first}, the model's vocabulary has 250 rows"):
        source = load(prefix)
        for index in range(len(source)):
            source[index]


def build_on_rank(rank: int, world_size: int, prefix: str) -> list:
    with pytest.raises(DataError) as caught:
        load(Path(prefix))
    return [str(caught.value), caught.value.field]


def test_output_that_cannot_be_written_fails_on_all_ranks(tmp_path: Path) -> None:
    write_set(tmp_path / "set", consecutive([40, 60]))
    (tmp_path / "out").write_text("a file where the folder should be")
    first, second = run_distributed(build_on_rank, 2, str(tmp_path / "set"))
    message, field = first
    assert "out/data_index" in message and field == "output_path"
    assert second == [f"rank 0: {message}", field]
