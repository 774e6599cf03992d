"""Any part of a stored tensor is read through a small buffer. Oracles: indexing, torch, upstream."""

import io
from pathlib import Path
from threading import Event

import pytest
import torch
import torch.distributed.checkpoint as dcp
from distributed_runner import run_distributed
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from upstream_saver import let_upstream_save

from patch import compat
from patch.checkpoint import load_checkpoint, save_checkpoint, stored
from patch.checkpoint.data_files import NUM_FILES, PieceWriter, write_data
from patch.checkpoint.stored import Box, Piece, TorchDistReader
from patch.storage.checksums import content

MIB = 2**20
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn]
PARTS = [
    ((7,), (2,), (4,)),
    ((40, 9), (3, 2), (30, 5)),
    ((40, 9), (0, 0), (40, 9)),
    ((3, 40, 9), (1, 5, 0), (2, 20, 9)),
    ((3, 5, 4, 6), (1, 2, 1, 3), (1, 3, 2, 2)),
    ((2, 1000), (1, 10), (1, 900)),
    ((4, 3), (2, 0), (0, 3)),
    ((), (), ()),
]


def part_of(tensor: torch.Tensor, offsets: tuple, lengths: tuple) -> torch.Tensor:
    """What torch's indexing gives."""
    return tensor[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]


@pytest.mark.parametrize("window", [4, 64, 4096])
@pytest.mark.parametrize(("shape", "offsets", "lengths"), PARTS)
def test_part_of_a_tensor_is_what_indexing_gives(tmp_path, monkeypatch, shape, offsets, lengths, window):
    whole = torch.randn(shape)
    writer = PieceWriter(tmp_path)
    writer.add(Piece("before", (0,), torch.ones(3)), (3,))
    writer.add(Piece("whole", (0,) * len(shape), whole), shape)
    writer.finish({})
    monkeypatch.setattr(stored, "WINDOW_BYTES", window)
    roomy = torch.full((3, *lengths, 2), -1.0)
    targets = [torch.full(lengths, -1.0), torch.full(lengths, -1.0, dtype=torch.bfloat16), roomy[1, ..., 0]]
    reader = TorchDistReader(tmp_path)
    reader.fill([("whole", Box(offsets, lengths), target) for target in targets])
    for target in targets:
        assert torch.equal(target, part_of(whole, offsets, lengths).to(target.dtype))
    assert bool((roomy[[0, 2]] == -1).all())


@pytest.mark.parametrize("is_strided", [False, True])
def test_files_hold_what_torch_reads_and_their_checksums(tmp_path, is_strided):
    base = torch.randn(50, 40)
    values = [
        base.t() if is_strided else base[10:30],
        io.BytesIO(b"object"),
        torch.zeros(0, 3),
        torch.tensor(7),
    ]
    values += [(torch.randn(11) * 4).to(dtype) for dtype in DTYPES] + [torch.zeros(1).expand(9)]
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
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _memory("VmRSS")
    load_checkpoint(
        root, 1, {"model": {"w": ShardedTensor.from_rank_offsets("w", target, (0, 50 + rank, 100))}}
    )
    growth = _memory("VmHWM") - before
    first = 16 * (50 + rank)
    assert torch.equal(target[:, 7], torch.arange(first, first + 16, dtype=torch.float32))
    return num_bytes, growth


def of_all_ranks(tensor: torch.Tensor, rank: int) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("w", tensor, replica_id=rank)


def _memory(name: str) -> int:
    """Bytes of this process, from /proc/self/status."""
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) * 1024


def test_rank_that_loads_a_hundredth_of_a_tensor_holds_little_more(tmp_path):
    for num_bytes, growth in run_distributed(load_a_hundredth, 2, str(tmp_path)):
        assert num_bytes == 25 * MIB and growth < 6 * MIB


def test_upstream_and_torch_read_what_was_written_and_the_other_way_round(tmp_path):
    run_distributed(exchange_with_upstream, 1, str(tmp_path))


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
