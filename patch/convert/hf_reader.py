"""Reads a Hugging Face folder lazily: headers at once, bytes only of the slices asked for.

Each access maps the file anew and lets go of it afterwards, so that pages which were read do not stay in this
process's memory.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from patch.compat.unpickle import load_plain
from patch.convert.mappings import HFTensor
from patch.errors import ConversionError, nearest

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_BIN = ("pytorch_model.bin", "pytorch_model.bin.index.json")
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Types that are read, in safetensors' spelling."""
SPELLINGS = {dtype: spelling for spelling, dtype in DTYPES.items()}
_CURE = "model_size auto takes the shape from config.json"
_ROWS = 4096
"""Rows that are compared at once."""
_DERIVED = "rotary_emb.inv_freq"
"""Old folders store these RoPE frequencies; they follow from config.json."""


class _Stored(NamedTuple):
    path: Path
    shape: tuple[int, ...]
    dtype: str


class HFFolder:
    """The tensors of a Hugging Face folder by name.

    Raises:
        ConversionError: neither safetensors nor .bin, a file that is missing or broken.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stored: dict[str, _Stored] = {}
        for path in _shard_files(folder):
            opened = _open(path)
            for name in opened:
                tensor = opened[name]
                self._stored[name] = _Stored(path, _shape(tensor), _dtype(tensor))

    def __getitem__(self, name: str) -> Any:
        """The lazy slice of a tensor: indexing it reads."""
        return _open(self._stored[name].path)[name]

    def file_of(self, name: str) -> Path:
        """The file that a tensor lies in."""
        return self._stored[name].path

    def dtype(self, name: str) -> torch.dtype:
        """The type of a checked tensor."""
        return DTYPES[self._stored[name].dtype]

    def dtypes(self, names: Iterable[str]) -> set[str]:
        """The stored types among these tensors, in safetensors' spelling."""
        return {self._stored[name].dtype for name in names}

    def check(self, expected: list[HFTensor], *, unused: frozenset[str] = frozenset()) -> None:
        """Compare names, shapes and types with what a model needs; reads headers only.

        Args:
            unused: names that may be there and are not needed.
        Raises:
            ConversionError: a tensor is missing, unexpected, of another shape or of an unreadable type.
        """
        for tensor in expected:
            self._check_tensor(tensor)
        known = {tensor.name for tensor in expected} | unused
        extra = [name for name in self._stored if name not in known and not name.endswith(_DERIVED)]
        if extra:
            found = self._stored[extra[0]]
            raise ConversionError(
                f"{found.path} holds {extra[0]} (shape {found.shape}), which this "
                f"model has no place for ({len(extra)} such tensors); expected a model of the "
                f"configured family and layers: {_CURE}",
                field="model_size",
            )

    def check_copy(self, name: str, original: str) -> None:
        """Compare a tensor that may be stored beside the one it is tied to; reads both, part by part.

        Raises:
            ConversionError: it is there and differs, or is of an unreadable type.
        """
        if name not in self._stored:
            return
        self._check_tensor(HFTensor(name, self._stored[original].shape))
        for start in range(0, self._stored[original].shape[0], _ROWS):
            part = slice(start, start + _ROWS)
            if not torch.equal(self[name][part], self[original][part]):
                raise ConversionError(
                    f"{name} in {self.file_of(name)} differs from {original}, expected a copy of it since "
                    "config.json has tie_word_embeddings true: set that to false (as "
                    "transformers 5 takes it) and load again"
                )

    def _check_tensor(self, tensor: HFTensor) -> None:
        if tensor.name not in self._stored:
            files = sorted({stored.path.name for stored in self._stored.values()})
            raise ConversionError(
                f"{self.folder} has no tensor {tensor.name} of shape {tensor.shape}; its {len(self._stored)} "
                f"tensors in {', '.join(files)} were searched{nearest(tensor.name, sorted(self._stored))}"
            )
        found = self._stored[tensor.name]
        if found.shape != tensor.shape:
            raise ConversionError(
                f"{tensor.name} in {found.path} has shape {found.shape}, the model expects "
                f"{tensor.shape}: {_CURE}",
                field="model_size",
            )
        if found.dtype not in DTYPES:
            raise ConversionError(
                f"{tensor.name} in {found.path} is stored as {found.dtype}, expected one "
                f"of {', '.join(DTYPES)}: use the folder of the model that is not quantised"
            )


class _Slices(dict[str, Any]):
    """safetensors' lazy slices by name, made when asked for."""

    def __init__(self, file: Any) -> None:
        super().__init__(dict.fromkeys(file.keys()))
        self._file = file

    def __getitem__(self, name: str) -> Any:
        return self._file.get_slice(name)


def _open(path: Path) -> dict[str, Any]:
    """The lazily read tensors of a file."""
    kind = "safetensors" if path.suffix == ".safetensors" else "a torch.save file"
    try:
        if path.suffix == ".safetensors":
            return _Slices(safe_open(str(path), framework="pt", device="cpu"))
        tensors = load_plain(path, "cpu", mmap=True)
    except pickle.UnpicklingError as error:
        raise ConversionError(f"{path} holds more than tensors and was not read") from error
    except (SafetensorError, OSError, RuntimeError, EOFError, ValueError) as error:
        raise ConversionError(
            f"{path} ({path.stat().st_size} bytes) cannot be read as {kind}: {error}; expected a "
            "whole file: copy or download it again"
        ) from error
    if not isinstance(tensors, dict) or not all(isinstance(v, torch.Tensor) for v in tensors.values()):
        raise ConversionError(f"{path} holds something else than tensors by name")
    return tensors


def _shape(lazy: Any) -> tuple[int, ...]:
    return tuple(lazy.shape if isinstance(lazy, torch.Tensor) else lazy.get_shape())


def _dtype(lazy: Any) -> str:
    if isinstance(lazy, torch.Tensor):
        return SPELLINGS.get(lazy.dtype, str(lazy.dtype))
    return lazy.get_dtype()


def _shard_files(folder: Path) -> list[Path]:
    """The files that hold weights; as transformers does, the single file wins over an index."""
    for single, index in ((SINGLE, INDEX), _BIN):
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            return _indexed_files(folder, index)
    raise ConversionError(f"{folder} holds neither {SINGLE} nor {INDEX}, nor {' or '.join(_BIN)}")


def _indexed_files(folder: Path, index: str) -> list[Path]:
    placed = read_index(folder / index)
    for name, file in placed.items():
        if not (folder / file).is_file():
            count = list(placed.values()).count(file)
            raise ConversionError(
                f"{folder / file} is missing; {index} places {name} and {count - 1} other tensors in it: "
                "copy or download it again"
            )
    return [folder / file for file in sorted(set(placed.values()))]


def read_index(path: Path) -> dict[str, str]:
    """Which file each tensor lies in, as an index of transformers says.

    Raises:
        ConversionError: it cannot be read, or names a file outside of its folder.
    """
    try:
        placed: dict[str, str] = json.loads(path.read_bytes())["weight_map"]
        outside = [file for file in placed.values() if Path(file).name != file]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConversionError(f"{path} is no index of weights: {error!r}") from error
    if outside:
        raise ConversionError(f"{path} names a file outside of its folder: {outside[0]}")
    return placed
