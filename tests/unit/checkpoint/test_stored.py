"""Any part of what torch's own distributed checkpoint or ours wrote; and hostile files."""

import pickle
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from torch.distributed import checkpoint as dcp

from patch.checkpoint import stored
from patch.checkpoint.data_files import PieceWriter
from patch.checkpoint.stored import Box, LegacyReader, Piece, TorchDistReader, open_stored
from patch.errors import CheckpointError

STATE = {
    "vector": torch.randn(70),
    "matrix": torch.randn(9, 33).bfloat16(),
    "wide": torch.randn(3, 700),  # one row is larger than a window
    "stacked": torch.randn(3, 10, 16).half(),
    "stacked vectors": torch.randn(40, 3),
    "transposed": torch.randn(6, 8).t(),
    "part of a storage": torch.randn(10, 4)[3:5],
    "number": torch.tensor(3.5),
    "empty": torch.zeros(0, 4),
}


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch):
    monkeypatch.setattr(stored, "WINDOW_BYTES", 128)


def _read(folder: Path, keys: set[str]) -> dict[str, torch.Tensor]:
    """The whole tensors; every value must come exactly once."""
    found = {key: torch.zeros_like(STATE[key]) for key in keys}
    times = {key: torch.zeros(STATE[key].shape) for key in keys}
    for key, offsets, values in TorchDistReader(folder).pieces(keys):
        place = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
        assert values.nbytes <= 128 and values.dtype == STATE[key].dtype
        found[key][place] = values
        times[key][place] += 1
    assert all((count == 1).all() for count in times.values())
    return found


def _write(folder: Path) -> None:
    writer = PieceWriter(folder)
    for key, tensor in STATE.items():
        for start in range(0, len(tensor), 4) if len(tensor.shape) and len(tensor) else (0,):
            part = tensor[start : start + 4].clone() if tensor.ndim else tensor
            offsets = (start, *[0] * (tensor.ndim - 1))[: tensor.ndim]
            writer.add(Piece(key, offsets, part), tuple(tensor.shape))
    writer.finish({})


def _torch_writes(folder: Path) -> None:
    dcp.save(STATE, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')


@pytest.mark.parametrize("write", [_write, _torch_writes])
def test_all_values_come_once_in_windows_and_any_part_is_what_indexing_gives(tmp_path, write):
    write(tmp_path)
    found = _read(tmp_path, set(STATE) - {"vector"})
    found |= _read(tmp_path, {"vector"})
    assert all(torch.equal(found[key], tensor) for key, tensor in STATE.items())
    reader = TorchDistReader(tmp_path)
    for key, tensor in STATE.items():
        offsets = tuple(size // 3 for size in tensor.shape)
        sizes = tuple(size - begin - size // 4 for size, begin in zip(tensor.shape, offsets, strict=True))
        expected = tensor[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
        assert torch.equal(reader.read(key, Box(offsets, sizes)), expected), key


def test_what_we_write_is_read_by_torch(tmp_path):
    _write(tmp_path)
    theirs = {key: torch.empty_like(tensor) for key, tensor in STATE.items()}
    dcp.load(theirs, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert all(torch.equal(theirs[key], tensor) for key, tensor in STATE.items())


def test_tensors_in_torchs_format_before_1_6_are_read(tmp_path, monkeypatch):
    save = torch.save
    monkeypatch.setattr(
        torch, "save", lambda value, file: save(value, file, _use_new_zipfile_serialization=False)
    )
    writer = PieceWriter(tmp_path)
    writer.add(Piece("matrix", (0, 0), STATE["matrix"]), (9, 33))
    writer.finish({})
    assert torch.equal(_read(tmp_path, {"matrix"})["matrix"], STATE["matrix"])


def _edit_index(folder: Path, harm) -> None:
    path = folder / ".metadata"
    index = pickle.loads(path.read_bytes())
    harm(index)
    path.write_bytes(pickle.dumps(index))


def test_record_that_is_another_tensor_is_named(tmp_path):
    _write(tmp_path)

    def exchange(index) -> None:
        records = {where.fqn: where for where in index.storage_data}
        index.storage_data[records["matrix"]] = index.storage_data[records["vector"]]
        index.storage_data[records["stacked vectors"]] = index.storage_data[records["wide"]]

    _edit_index(tmp_path, exchange)
    reader = TorchDistReader(tmp_path)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: matrix .* is torch.float32 .* index says"):
        list(reader.pieces({"matrix"}))
    with pytest.raises(CheckpointError, match=r"stacked vectors .*\(3, 700\), its index says .*\(4, 3\)"):
        list(reader.pieces({"stacked vectors"}))


def test_missing_piece_is_named(tmp_path):
    _write(tmp_path)

    def drop(index) -> None:
        index.state_dict_metadata["vector"].chunks.pop(3)

    _edit_index(tmp_path, drop)
    with pytest.raises(CheckpointError, match=r"the pieces of vector do not cover it at \(0,\)"):
        TorchDistReader(tmp_path).read("vector", Box((0,), (70,)))


def _in_itself() -> dict:
    values: dict = {"weight": torch.ones(2)}
    values["again"] = values
    return values


def _again_and_again() -> list:
    values: list = [torch.ones(2)]
    for _ in range(60):
        values = [values, values]
    return values


@pytest.mark.parametrize("make", [_in_itself, _again_and_again])
def test_old_format_with_values_that_never_end_is_read_once(tmp_path, make):
    folder = tmp_path / "mp_rank_00"
    folder.mkdir()
    torch.save({"model": make()}, folder / "model_optim_rng.pt")
    assert len(open_stored(tmp_path).tensors) == 1


def test_old_format_that_is_nested_too_deeply_is_an_error(tmp_path):
    folder = tmp_path / "mp_rank_00"
    folder.mkdir()
    # Lists in lists, as opcodes: a pickler cannot write them, a reader needs no recursion to unpickle them.
    values = pickle.EMPTY_LIST * 5000 + pickle.APPEND * 4999
    key = pickle.SHORT_BINUNICODE + bytes([5]) + b"model"
    data = pickle.PROTO + b"\4" + pickle.EMPTY_DICT + key + values + pickle.SETITEM + pickle.STOP
    torch.save({}, tmp_path / "empty.pt")
    with ZipFile(tmp_path / "empty.pt") as source, ZipFile(folder / "model_optim_rng.pt", "w") as target:
        for name in source.namelist():
            target.writestr(name, data if name.endswith("/data.pkl") else source.read(name))
    with pytest.raises(CheckpointError, match=r"model_optim_rng.pt cannot be read: .* nested too deeply"):
        LegacyReader(tmp_path)
