"""Pieces read window by window from what torch's own distributed checkpoint wrote, and its reader of ours."""

from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp

from patch.checkpoint import streaming
from patch.checkpoint.streaming import Piece, PieceWriter, read_pieces
from patch.compat.unpickle import read_metadata
from patch.errors import CheckpointError

STATE = {
    "vector": torch.randn(70),
    "matrix": torch.randn(9, 33).bfloat16(),
    "wide": torch.randn(3, 700),  # one row is larger than a window
    "stacked": torch.randn(3, 10, 16).half(),
    "stacked vectors": torch.randn(40, 3),
    "transposed": torch.randn(6, 8).t(),
    "part of a storage": torch.randn(10, 4)[3:5],
}


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch):
    monkeypatch.setattr(streaming, "WINDOW_BYTES", 128)


def _read(folder: Path, keys: set[str]) -> dict[str, torch.Tensor]:
    """The whole tensors; every value must come exactly once."""
    index = read_metadata(folder / ".metadata")
    found, times = {}, {}
    for key, offsets, values in read_pieces(folder, index, keys):
        whole = found.setdefault(key, torch.zeros(STATE[key].shape, dtype=values.dtype))
        count = times.setdefault(key, torch.zeros(STATE[key].shape))
        place = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
        whole[place] = values
        count[place] += 1
    assert all((count == 1).all() for count in times.values())
    return found


def test_what_torch_writes_is_read(tmp_path):
    dcp.save(STATE, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    found = _read(tmp_path, set(STATE) - {"vector"})
    assert found.keys() == STATE.keys() - {"vector"}
    found |= _read(tmp_path, {"vector"})
    assert all(torch.equal(found[key], tensor) for key, tensor in STATE.items())


def _write(folder: Path) -> None:
    writer = PieceWriter(folder)
    for key, tensor in STATE.items():
        for start in range(0, len(tensor), 4):
            part = tensor[start : start + 4].clone()
            writer.add(Piece(key, (start, *[0] * (tensor.ndim - 1)), part), tuple(tensor.shape))
    writer.finish({})


def test_what_we_write_is_read_by_torch_and_by_us(tmp_path):
    _write(tmp_path)
    theirs = {key: torch.empty_like(tensor) for key, tensor in STATE.items()}
    dcp.load(theirs, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    for found in (theirs, _read(tmp_path, set(STATE))):
        assert all(torch.equal(found[key], tensor) for key, tensor in STATE.items())


def test_record_that_is_another_tensor_is_named(tmp_path):
    _write(tmp_path)
    index = read_metadata(tmp_path / ".metadata")
    records = {where.fqn: where for where in index.storage_data}
    index.storage_data[records["matrix"]] = index.storage_data[records["vector"]]
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: matrix is torch.float32, its index says"):
        list(read_pieces(tmp_path, index, {"matrix"}))
