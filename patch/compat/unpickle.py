"""Restricted unpicklers for all files of a checkpoint, so that no file can run code.

- torch/distributed/checkpoint/filesystem.py:930 (`FileSystemReader.read_metadata`): `pickle.load` of
  `.metadata` would run code in that file.
- torch/distributed/checkpoint/default_planner.py:387-391 (`DefaultLoadPlanner.load_bytes`) reads sharded
  objects with `torch.load(weights_only=False)`.
- Old checkpoints of Megatron-LM contain argparse.Namespace and enums besides tensors.
- The safe default of torch.load is switched off by TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 in the environment.

Delete an entry when that file is read without pickle, or with an explicit `weights_only=True`.
"""

from __future__ import annotations

import enum
import io
import pickle
import pickletools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint import metadata

from patch.errors import CheckpointError
from patch.storage.places import AnyPath
from patch.storage.text_files import read_small

_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_MOST_METADATA_BYTES = 1 << 32
_MEMO_PUTS = ("PUT", "BINPUT", "LONG_BINPUT")

ALLOWED = frozenset(
    {
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        (_METADATA, "BytesStorageMetadata"),
        (_METADATA, "ChunkStorageMetadata"),
        (_METADATA, "Metadata"),
        (_METADATA, "MetadataIndex"),
        (_METADATA, "StorageMeta"),
        (_METADATA, "TensorProperties"),
        (_METADATA, "TensorStorageMetadata"),
        (_METADATA, "_MEM_FORMAT_ENCODING"),
        (_PLANNER, "BytesIOWriteData"),
        (_PLANNER, "SavePlan"),
        (_PLANNER, "TensorWriteData"),
        (_PLANNER, "WriteItem"),
        (_PLANNER, "WriteItemType"),
    }
    | {("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
)
"""Globals in `.metadata` files of torch 2.11 to 2.13: data classes, enums, dtypes, and the folder's Path, a
class that Python 3.13 moved.
"""


def _check_memo_size(contents: bytes) -> io.BytesIO:
    """Return a pickle as a stream. Raise ValueError if it is truncated, or a memo index exceeds its length:
    the unpickler in C allocates the memo that a pickle asks for, 64 GB for 2**32 entries.
    """
    for opcode, argument, _ in pickletools.genops(contents):
        if opcode.name in _MEMO_PUTS and cast(int, argument) > len(contents):
            raise ValueError(f"it uses memo entry {argument}, but has only {len(contents)} bytes")
    return io.BytesIO(contents)


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Turn errors of the unpickler into ValueErrors, unless their message is clear."""
    try:
        yield
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError):
        raise
    except Exception as error:
        raise ValueError(f"malformed pickle: {type(error).__name__}: {error}") from error


class _MetadataUnpickler(pickle.Unpickler):
    """Loads only the classes in ALLOWED and members of enums."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


def _enum_member(kind: Any, name: Any) -> enum.Enum:
    """Replace `getattr`: find only members of enums, which early Python 3.11 pickles with getattr."""
    if not (isinstance(kind, enum.EnumMeta) and name in kind.__members__):
        raise pickle.UnpicklingError("it asks for builtins.getattr on something other than an enum's member")
    return kind.__members__[name]


def read_metadata(path: AnyPath) -> metadata.Metadata:
    """Return the index of a torch_dist checkpoint: shape, dtype and files of each tensor.

    Args:
        path: the checkpoint's `.metadata` file.
    Raises:
        CheckpointError: it is missing, truncated, or contains anything but an index.
    """
    try:
        contents = read_small(path, _MOST_METADATA_BYTES)
        index = _MetadataUnpickler(_check_memo_size(contents)).load()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing: the checkpoint is not complete") from error
    except Exception as error:  # noqa: BLE001 - hostile bytes can make the unpickler raise anything
        raise CheckpointError(f"{path} was not read: {error or type(error).__name__}") from error
    if not isinstance(index, metadata.Metadata):
        raise CheckpointError(f"{path} holds a {type(index).__name__}, expected the index of a checkpoint")
    return index


def load_plain(source: Path | str | IO[bytes], map_location: str | None = None, mmap: bool = False) -> Any:
    """Load tensors and plain types only with torch.load, whatever the environment variables say.

    Args:
        map_location: the device of the tensors, or None for the device they were saved from.
        mmap: tensors are views of the mapped file, read on use.
    Raises:
        pickle.UnpicklingError: the file contains other types.
        OSError, RuntimeError, EOFError, ValueError: it is missing or damaged.
    """
    with _translate_errors():
        return torch.load(source, map_location=map_location, weights_only=True, mmap=mmap)


_TENSORS = frozenset(
    {
        ("collections", "OrderedDict"),
        ("torch", "Size"),
        ("torch._utils", "_rebuild_parameter"),
        ("torch._utils", "_rebuild_tensor"),
        ("torch._utils", "_rebuild_tensor_v2"),
    }
    | {("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
)
"""Globals that pickled tensors need; torch.load itself provides the storages."""


class _Inert:
    """A stand-in for an object of any other class: accepts every call and does nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Inert:
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> _Inert:
        return self

    def _ignore(self, *args: Any) -> None:
        pass

    __setstate__ = __setitem__ = append = extend = _ignore


class _InertUnpickler(pickle.Unpickler):
    """Loads tensors, and _Inert for other objects. torch.load gives it the pickle of a zip file."""

    def __init__(self, stream: IO[bytes], **options: Any) -> None:
        super().__init__(_check_memo_size(stream.read()), **options)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _TENSORS:
            return super().find_class(module, name)
        return type(name, (_Inert,), {"__module__": module})


def load_tensors(source: Path | io.BytesIO) -> Any:
    """Load a torch.save file that contains other objects besides tensors; these become empty stand-ins.

    Nothing is imported and no code of the file is run. A file on disk is mapped; its tensors are views.

    Raises:
        OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError: it is missing or damaged, or is a
            TorchScript archive, whose code torch.load would run through torch.jit.load.
    """
    is_file = isinstance(source, Path)
    named: Any = str(source) if is_file else source
    if torch.serialization._is_torchscript_zip(torch._C.PyTorchFileReader(named)):
        raise pickle.UnpicklingError("it is a TorchScript archive, expected a torch.save file")
    if isinstance(source, io.BytesIO):
        source.seek(0)
    reader = SimpleNamespace(__name__=__name__, Unpickler=_InertUnpickler)
    with _translate_errors():
        return torch.load(source, "cpu", pickle_module=reader, weights_only=False, mmap=is_file)


_STORAGES = (
    ("torch.storage", "_load_from_bytes"),
    ("megatron.core.safe_globals", "safe_load_from_bytes"),  # the replacement in 0.19
)


class _BytesUnpickler(_InertUnpickler):
    """_InertUnpickler for a plain pickle, in which each tensor storage is a torch.save file."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _STORAGES:
            return lambda contents: load_plain(io.BytesIO(contents))
        return super().find_class(module, name)


def unpickle_tensors(contents: bytes) -> Any:
    """Unpickle tensors and plain values; objects of other classes become empty stand-ins.

    Nothing is imported and no code of the pickle is run.

    Raises:
        EOFError, RuntimeError, ValueError, pickle.UnpicklingError: it is damaged.
    """
    with _translate_errors():
        return _BytesUnpickler(io.BytesIO(contents)).load()
