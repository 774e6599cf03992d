"""Nothing that is read from a checkpoint runs code."""

import io
import pickle
import tracemalloc
import zipfile
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import save as torch_save_checkpoint
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItemType

from patch.compat import unpickle
from patch.errors import CheckpointError


@pytest.mark.parametrize("protocol", [0, 4])
@pytest.mark.parametrize(
    "module, name",
    [("posix", "mkdir"), ("torch", "load"), ("torch.serialization", "os.system"), ("builtins", "setattr")],
)
def test_allow_list_refuses_names_beside_the_allowed_ones(tmp_path, protocol, module, name):
    if protocol < 4:
        ask = f"c{module}\n{name}\n.".encode()
    else:
        words = [bytes([len(word)]) + word.encode() for word in (module, name)]
        ask = b"\x80\x04\x8c" + b"\x8c".join(words) + b"\x93."
    (tmp_path / ".metadata").write_bytes(ask)
    with pytest.raises(CheckpointError, match=f"{module}.{name}, which no checkpoint needs"):
        unpickle.read_metadata(tmp_path / ".metadata")


class AskedFor:
    """Pickled as `getattr(owner, name)`, as early Python 3.11 does with the members of enums."""

    def __init__(self, owner: object, name: str) -> None:
        self.asked = owner, name

    def __reduce__(self) -> tuple:
        return getattr, self.asked


def test_members_of_enums_are_read_as_every_python_writes_them_and_nothing_else_is_got(tmp_path):
    def read(owner, name):
        index = Metadata({}, planner_data=AskedFor(owner, name))
        (tmp_path / ".metadata").write_bytes(pickle.dumps(index))
        return unpickle.read_metadata(tmp_path / ".metadata").planner_data

    assert read(WriteItemType, "TENSOR") is WriteItemType.TENSOR
    wrong = (WriteItemType, "__class__"), (WriteItemType, "mro"), (torch.Size, "count"), ("text", "join")
    for owner, name in wrong:
        with pytest.raises(CheckpointError, match="builtins.getattr on something other"):
            read(owner, name)


@pytest.mark.parametrize("content", [b"", b"\x80", b"not a pickle", pickle.dumps({"a": 1})])
def test_metadata_that_is_no_index_is_refused(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        unpickle.read_metadata(tmp_path / ".metadata")


def saved_with(pickled: bytes, path: Path) -> Path:
    """A file of torch.save whose pickle is this one."""
    whole = io.BytesIO()
    torch.save({"w": torch.ones(2)}, whole)
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(path, "w") as target:
        for entry in source.infolist():
            is_pickle = entry.filename.endswith("data.pkl")
            target.writestr(entry, pickled if is_pickle else source.read(entry))
    return path


MALFORMED = {
    "memo without entry": b"h\x09.",
    "empty stack": b"\x85.",
    "item of None": b"NNNs.",
    "appended to None": b"NNa.",
    "called with a number": b"ctorch._utils\n_rebuild_tensor_v2\nK\x05R.",
    "tensor of nothing": b"ctorch._utils\n_rebuild_tensor_v2\n(NNNNNNtR.",
    "dtype called": b"ctorch\nfloat32\n)R.",
    "list as a key": b"}]Ns.",
    "storage of another name": b"(X\x01\x00\x00\x00atQ.",
    "cut short": b"X\x00\x00\x00\x40a.",
    "memo of 1 GiB": b"Nr" + (2**26).to_bytes(4, "little") + b".",
    "memo of 1 GiB in digits": b"Np%d\n." % 2**26,
}


@contextmanager
def little_memory():
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", MALFORMED)
@pytest.mark.parametrize("read", [unpickle.load_plain, unpickle.load_tensors])
def test_malformed_pickle_is_one_kind_of_error_and_takes_no_memory(tmp_path, kind, read):
    path = saved_with(b"\x80\x02" + MALFORMED[kind], tmp_path / "weights.pt")
    with little_memory(), suppress(ValueError, RuntimeError, EOFError, pickle.UnpicklingError):
        read(path)


def test_malformed_index_takes_no_memory(tmp_path):
    (tmp_path / ".metadata").write_bytes(b"\x80\x02" + MALFORMED["memo of 1 GiB"])
    said = "it uses memo entry 67108864, but has only 9 bytes"
    with little_memory(), pytest.raises(CheckpointError, match=said):
        unpickle.read_metadata(tmp_path / ".metadata")


class Program(torch.nn.Module):
    """Says that it was loaded, from TorchScript."""

    number: int

    def __init__(self) -> None:
        super().__init__()
        self.number = 1

    @torch.jit.export
    def __getstate__(self) -> tuple[int, bool]:
        return self.number, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[int, bool]) -> None:
        print("code of the file ran")
        self.number, self.training = state


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_program_in_the_place_of_tensors_is_not_run(tmp_path, capfd):
    torch.jit.script(Program()).save(str(tmp_path / "weights.pt"))
    with pytest.raises(pickle.UnpicklingError, match="TorchScript"):
        unpickle.load_tensors(tmp_path / "weights.pt")
    assert "code of the file ran" not in capfd.readouterr().out


def test_index_of_torch_with_every_dtype_is_read(tmp_path):
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64, torch.bool]
    saved = {str(dtype): torch.arange(4).to(dtype) for dtype in dtypes} | {"step": 3}
    torch_save_checkpoint(saved, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    index = unpickle.read_metadata(tmp_path / ".metadata")
    stored = {key: getattr(entry, "properties", None) for key, entry in index.state_dict_metadata.items()}
    assert stored.pop("step") is None
    assert {key: of.dtype for key, of in stored.items()} == {str(each): each for each in dtypes}
