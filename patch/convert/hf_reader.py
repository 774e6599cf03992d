"""Reads a Hugging Face folder's safetensors lazily: headers at once, bytes only of the slices asked for."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from patch.convert.mappings import HFTensor
from patch.errors import ConversionError, nearest

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
READABLE = ("F32", "BF16", "F16")
_CURE = "MODEL_SIZE (position 2) auto takes the shape from config.json"
_ROWS = 4096
"""Rows that are compared at once."""
_DERIVED = "rotary_emb.inv_freq"
"""Old folders store these RoPE frequencies; they follow from config.json."""


class HFFolder:
    """The tensors of a Hugging Face folder by name; a context manager that holds the files open.

    Raises:
        ConversionError: no safetensors, a file that is missing or broken.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = contextlib.ExitStack()
        self._slices: dict[str, Any] = {}
        self._files: dict[str, Path] = {}
        for path in _shard_files(folder):
            self._open(path)

    def _open(self, path: Path) -> None:
        try:
            shard = self._stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise ConversionError(
                f"{path} ({path.stat().st_size} bytes) cannot be read as safetensors: {error}; expected a "
                "whole file: copy or download it again"
            ) from error
        for name in shard.keys():  # noqa: SIM118 - not a dict
            self._slices[name] = shard.get_slice(name)
            self._files[name] = path

    def __enter__(self) -> HFFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> Any:
        """The lazy slice of a tensor: indexing it reads."""
        return self._slices[name]

    def dtypes(self, names: Iterable[str]) -> set[str]:
        """The stored types among these tensors, in safetensors' spelling."""
        return {self._slices[name].get_dtype() for name in names}

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
        extra = [name for name in self._slices if name not in known and not name.endswith(_DERIVED)]
        if extra:
            raise ConversionError(
                f"{self._files[extra[0]]} holds {extra[0]} (shape {_shape(self[extra[0]])}), which this "
                f"model has no place for ({len(extra)} such tensors); expected a model of the "
                f"configured family and layers: {_CURE}"
            )

    def check_copy(self, name: str, original: str) -> None:
        """Compare a tensor that may be stored beside the one it is tied to; reads both, part by part.

        Raises:
            ConversionError: it is there and differs.
        """
        if name not in self._slices:
            return
        for start in range(0, _shape(self[original])[0], _ROWS):
            part = slice(start, start + _ROWS)
            if not torch.equal(self[name][part], self[original][part]):
                raise ConversionError(
                    f"{name} in {self._files[name]} differs from {original}, expected a copy of it since "
                    "config.json has tie_word_embeddings true: set that to false (as "
                    "transformers 5 takes it) and load again"
                )

    def _check_tensor(self, tensor: HFTensor) -> None:
        if tensor.name not in self._slices:
            files = sorted({path.name for path in self._files.values()})
            raise ConversionError(
                f"{self.folder} has no tensor {tensor.name} of shape {tensor.shape}; its {len(self._files)} "
                f"tensors in {', '.join(files)} were searched{nearest(tensor.name, sorted(self._files))}"
            )
        found = self[tensor.name]
        if _shape(found) != tensor.shape:
            raise ConversionError(
                f"{tensor.name} in {self._files[tensor.name]} has shape {_shape(found)}, the model expects "
                f"{tensor.shape}: {_CURE}"
            )
        if found.get_dtype() not in READABLE:
            raise ConversionError(
                f"{tensor.name} in {self._files[tensor.name]} is stored as {found.get_dtype()}, expected one "
                f"of {', '.join(READABLE)}: use the folder of the model that is not quantised"
            )


def _shape(lazy: Any) -> tuple[int, ...]:
    return tuple(lazy.get_shape())


def _shard_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder; as transformers does, the single file wins over an index."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        has_bin = any(folder.glob("*.bin"))
        hint = " (.bin files are not read: save it once with safetensors)" if has_bin else ""
        raise ConversionError(f"{folder} holds neither {SINGLE} nor {INDEX}{hint}")
    try:
        placed: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConversionError(f"{folder / INDEX} is no index of safetensors: {error!r}") from error
    for name, file in placed.items():
        if not (folder / file).is_file():
            count = list(placed.values()).count(file)
            raise ConversionError(
                f"{folder / file} is missing; {INDEX} places {name} and {count - 1} other tensors in it: "
                "copy or download it again"
            )
    return [folder / file for file in sorted(set(placed.values()))]
