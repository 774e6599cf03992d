"""Any part of what is stored is read through a small buffer: indexing, torch, upstream; and hostile files."""

import io
import pickle
from pathlib import Path
from threading import Event
from zipfile import ZipFile

import pytest
import torch
from distributed_runner import run_distributed
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.distributed import checkpoint as dcp
from upstream_saver import let_upstream_save

from patch import compat
from patch.checkpoint import load_checkpoint, save_checkpoint, stored
from patch.checkpoint.data_files import NUM_FILES, PieceWriter, write_data
from patch.checkpoint.stored import Box, LegacyReader, Piece, TorchDistReader, open_stored
from patch.errors import CheckpointError
from patch.storage.checksums import content

MIB = 2**20
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn]
STATE = {
    "vector": torch.randn(70),
    "matrix": torch.randn(9, 33).bfloat16(),
    "wide": torch.randn(3, 700),  # one row is larger than a window
    "stacked": torch.randn(3, 10, 16).half(),
    "four axes": torch.randn(3, 5, 4, 6),
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
        assert values.nbytes <= stored.WINDOW_BYTES and values.dtype == STATE[key].dtype
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


@pytest.mark.parametrize(("write", "window"), [(_write, 128), (_write, 4), (_torch_writes, 128)])
def test_all_values_come_once_in_windows_and_any_part_is_what_indexing_gives(
    tmp_path, monkeypatch, write, window
):
    """Also in another type, and into a target that has gaps."""
    monkeypatch.setattr(stored, "WINDOW_BYTES", window)
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
        narrow = torch.full(sizes, -1.0, dtype=torch.bfloat16)
        roomy = torch.full((3, *sizes, 2), -1.0)
        reader.fill([(key, Box(offsets, sizes), target) for target in (narrow, roomy[1, ..., 0])])
        assert torch.equal(narrow, expected.bfloat16()) and torch.equal(roomy[1, ..., 0], expected.float())
        assert bool((roomy[[0, 2]] == -1).all()) and bool((roomy[..., 1] == -1).all())


@pytest.mark.parametrize("is_strided", [False, True])
def test_files_hold_what_torch_reads_and_their_checksums(tmp_path, is_strided):
    base = torch.randn(50, 40)
    values = [base.t() if is_strided else base[10:30], io.BytesIO(b"object"), torch.zeros(0, 3)]
    values += [(torch.randn(11) * 4).to(dtype) for dtype in DTYPES]
    values += [torch.tensor(7), torch.zeros(1).expand(9)]
    written = write_data(tmp_path, 3, values, cancelled=Event(), files=[])
    assert sorted(written.contents) == [f"__3_{number}.distcp" for number in range(NUM_FILES)]
    for name, saved in written.contents.items():
        assert saved == content(tmp_path / name)
    for value, (number, begin, length) in zip(values, written.places.tolist(), strict=True):
        record = (tmp_path / f"__3_{number}.distcp").read_bytes()[begin : begin + length]
        if isinstance(value, io.BytesIO):
            assert record == b"object"
            continue
        assert length < value.nbytes + 2000, "of a view only the view"
        read = torch.load(io.BytesIO(record), weights_only=True)
        assert (read.dtype, read.shape) == (value.dtype, value.shape)
        assert read.float().tolist() == value.float().tolist()


def test_files_that_are_not_all_mapped_at_once_are_read(one_process, tmp_path, monkeypatch):
    """A checkpoint of a thousand ranks has more files than a process may have open."""
    monkeypatch.setattr(stored, "_MOST_MAPPED", 1)
    monkeypatch.setattr(stored, "_KEPT_BYTES", 0)
    tensors = {name: torch.randn(5, 3) for name in ("a", "b")}
    shards = {name: ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in tensors.items()}
    save_checkpoint(tmp_path, 1, {"model": shards}, {})
    reader = TorchDistReader(tmp_path / "iter_0000001")
    for name in ("a", "b", "a"):
        assert torch.equal(reader.read(name, Box((0, 0), (5, 3))), tensors[name])
        assert len(reader._mapped) == 1


def of_all_ranks(tensor: torch.Tensor, rank: int) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("w", tensor, replica_id=rank)


def _memory(name: str) -> int:
    """Bytes of this process, from /proc/self/status."""
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) * 1024


def load_a_hundredth(rank: int, world_size: int, folder: str) -> tuple[int, int]:
    """Bytes of a tensor, and by how many this process's memory grew while it loaded a hundredth of it."""
    compat.apply(cuda=False)
    root, rows, columns = Path(folder), 1600, 4096
    whole = torch.arange(rows, dtype=torch.float32)[:, None].expand(rows, columns).contiguous()
    save_checkpoint(root, 1, {"model": {"w": of_all_ranks(whole, rank)}}, {})
    save_checkpoint(root, 2, {"model": {"w": of_all_ranks(whole[:1, :100], rank)}}, {})
    load_checkpoint(root, 2, {"model": {"w": of_all_ranks(torch.zeros(1, 100), rank)}})
    num_bytes = whole.nbytes
    del whole
    target = torch.full((16, columns), -1.0)
    wanted = ShardedTensor.from_rank_offsets("w", target, (0, 50 + rank, 100))
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _memory("VmRSS")
    load_checkpoint(root, 1, {"model": {"w": wanted}})
    growth = _memory("VmHWM") - before
    first = 16 * (50 + rank)
    assert torch.equal(target[:, 7], torch.arange(first, first + 16, dtype=torch.float32))
    return num_bytes, growth


def test_rank_that_loads_a_hundredth_of_a_tensor_holds_little_more(tmp_path):
    for num_bytes, growth in run_distributed(load_a_hundredth, 2, str(tmp_path)):
        assert num_bytes == 25 * MIB and growth < 6 * MIB


def exchange_with_upstream(rank: int, world_size: int, folder: str) -> None:
    compat.apply(cuda=False)
    values = {str(dtype): (torch.randn(6, 5) * 4).to(dtype) for dtype in DTYPES}

    def state(tensors: dict[str, torch.Tensor]) -> dict[str, ShardedTensor]:
        return {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in tensors.items()}

    def empty() -> dict[str, torch.Tensor]:
        return {key: torch.zeros_like(tensor) for key, tensor in values.items()}

    def equal(found: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(found[key].view(torch.uint8), values[key].view(torch.uint8)) for key in values)

    save_checkpoint(Path(folder), 1, {"model": state(values)}, {"iteration": 1})
    by_upstream = dist_checkpointing.load(state(empty()), f"{folder}/iter_0000001")
    by_torch = empty()
    dcp.load(by_torch, storage_reader=dcp.FileSystemReader(f"{folder}/iter_0000001"))
    theirs = Path(folder) / "iter_0000002"
    theirs.mkdir()
    let_upstream_save()
    dist_checkpointing.save({**state(values), "iteration": 2}, str(theirs))
    ours = empty()
    load_checkpoint(Path(folder), 2, {"model": state(ours)})
    assert equal(by_upstream) and equal(by_torch) and equal(ours)


def test_upstream_and_torch_read_what_was_written_and_the_other_way_round(tmp_path):
    run_distributed(exchange_with_upstream, 1, str(tmp_path))


def test_tensors_in_torchs_format_before_1_6_are_read(tmp_path, monkeypatch):
    save = torch.save
    monkeypatch.setattr(
        torch, "save", lambda value, file: save(value, file, _use_new_zipfile_serialization=False)
    )
    writer = PieceWriter(tmp_path)
    writer.add(Piece("matrix", (0, 0), STATE["matrix"]), (9, 33))
    writer.finish({})
    assert torch.equal(_read(tmp_path, {"matrix"})["matrix"], STATE["matrix"])


def _with_index(folder: Path, harm) -> TorchDistReader:
    """A reader of what was written, with a changed index."""
    _write(folder)
    index = pickle.loads((folder / ".metadata").read_bytes())
    harm(index)
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    return TorchDistReader(folder)


def test_record_that_is_another_tensor_is_named(tmp_path):
    def exchange(index) -> None:
        records = {where.fqn: where for where in index.storage_data}
        index.storage_data[records["matrix"]] = index.storage_data[records["vector"]]
        index.storage_data[records["stacked vectors"]] = index.storage_data[records["wide"]]

    reader = _with_index(tmp_path, exchange)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: matrix .* is torch.float32 .* index says"):
        list(reader.pieces({"matrix"}))
    with pytest.raises(CheckpointError, match=r"stacked vectors .*\(3, 700\), its index says .*\(4, 3\)"):
        list(reader.pieces({"stacked vectors"}))


def test_missing_piece_is_named(tmp_path):
    reader = _with_index(tmp_path, lambda index: index.state_dict_metadata["vector"].chunks.pop(3))
    with pytest.raises(CheckpointError, match=r"the pieces of vector do not cover it at \(0,\)"):
        reader.read("vector", Box((0,), (70,)))


@pytest.fixture
def old(tmp_path) -> Path:
    """The file of a rank in Megatron-LM's old format."""
    (tmp_path / "mp_rank_00").mkdir()
    return tmp_path / "mp_rank_00" / "model_optim_rng.pt"


def test_old_format_with_values_that_never_end_is_read_once(tmp_path, old):
    again_and_again: list = [torch.ones(2)]
    for _ in range(60):
        again_and_again = [again_and_again, again_and_again]
    in_itself = {"weight": again_and_again}
    in_itself["again"] = in_itself
    torch.save({"model": in_itself}, old)
    reader = open_stored(tmp_path)
    assert len(reader.tensors) == 1
    (piece,) = reader.pieces(set(reader.tensors))
    assert torch.equal(piece.tensor, torch.ones(2))


def test_old_format_that_is_nested_too_deeply_is_an_error(tmp_path, old):
    # Lists in lists, as opcodes: a pickler cannot write them, a reader needs no recursion to unpickle them.
    values = pickle.EMPTY_LIST * 5000 + pickle.APPEND * 4999
    key = pickle.SHORT_BINUNICODE + bytes([5]) + b"model"
    data = pickle.PROTO + b"\4" + pickle.EMPTY_DICT + key + values + pickle.SETITEM + pickle.STOP
    torch.save({}, tmp_path / "empty.pt")
    with ZipFile(tmp_path / "empty.pt") as source, ZipFile(old, "w") as target:
        for name in source.namelist():
            target.writestr(name, data if name.endswith("/data.pkl") else source.read(name))
    with pytest.raises(CheckpointError, match=r"model_optim_rng.pt cannot be read: .* nested too deeply"):
        LegacyReader(tmp_path)
