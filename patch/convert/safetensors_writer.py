"""Writes safetensors files block by block, in any order: first the headers, then each block at its position.

The safetensors library can only write all tensors of a file at once. The files are byte-equal to the
library's: tensors are sorted by element size, larger first, then by name. Format: 8 bytes with the header's
length, the header as JSON padded with spaces to a multiple of 8 bytes, then the values.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from patch.convert.hf_reader import SPELLINGS
from patch.convert.mappings import HFBlock, HFTensor
from patch.convert.target_folder import writing
from patch.errors import ConversionError
from patch.storage.places import EarlyFlush

_ORDER = (torch.float32, torch.bfloat16, torch.float16)


class _TensorPlace(NamedTuple):
    """The position of a tensor's values in its file."""

    path: Path
    descriptor: int
    begin: int
    """Byte offset of the first value in the file."""
    columns: int
    """Elements per row; 1 for a vector."""
    dtype: torch.dtype


class SafetensorsWriter:
    """Creates files with headers and space for their tensors; use it within `contextlib.closing`.

    Args:
        folder: an existing folder.
        dtypes: the dtype of each tensor that will be written.
        layout: file name by tensor name.
    Raises:
        ConversionError: a file cannot be created.
    """

    def __init__(
        self, folder: Path, dtypes: Mapping[HFTensor, torch.dtype], layout: Mapping[str, str]
    ) -> None:
        self._places: dict[str, _TensorPlace] = {}
        self._missing = {tensor.name: torch.Size(tensor.shape).numel() for tensor in dtypes}
        self._descriptors: list[int] = []
        self._early = EarlyFlush()
        for name in sorted({layout[tensor.name] for tensor in dtypes}):
            of_file = [(tensor, dtype) for tensor, dtype in dtypes.items() if layout[tensor.name] == name]
            of_file.sort(key=lambda item: (_ORDER.index(item[1]), item[0].name))
            with writing(folder / name):
                self._create_file(folder / name, of_file)

    def _create_file(self, path: Path, tensors: list[tuple[HFTensor, torch.dtype]]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        ends = [0]
        for (name, shape), dtype in tensors:
            ends.append(ends[-1] + torch.Size(shape).numel() * dtype.itemsize)
            header[name] = {"dtype": SPELLINGS[dtype], "shape": list(shape), "data_offsets": ends[-2:]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        self._descriptors.append(descriptor)
        _write(descriptor, memoryview(len(text).to_bytes(8, "little") + text), 0)
        os.truncate(descriptor, 8 + len(text) + ends[-1])
        for ((name, shape), dtype), begin in zip(tensors, ends[:-1], strict=True):
            columns = torch.Size(shape[1:]).numel()
            self._places[name] = _TensorPlace(path, descriptor, 8 + len(text) + begin, columns, dtype)

    def write(self, block: HFBlock) -> None:
        """Write a block at its position: complete rows in one write, partial rows separately.

        Raises:
            ConversionError: the file cannot be written.
        """
        path, descriptor, begin, columns, dtype = self._places[block.name]
        assert block.values.dtype == dtype, f"{block.name} is {block.values.dtype}, expected {dtype}"
        values = block.values.reshape(block.values.shape[0], -1)
        if values.shape[1] == columns:
            values = values.reshape(1, -1)
        data = values.contiguous().view(torch.uint8).numpy()
        with writing(path):
            for index in range(values.shape[0]):
                first = (block.row + index) * columns + block.column
                _write(descriptor, memoryview(data[index]), begin + first * dtype.itemsize)
        self._early.wrote(data.nbytes, *self._descriptors)
        self._missing[block.name] -= values.numel()

    def check_complete(self) -> None:
        """Check that every value of every tensor was written once.

        Raises:
            ConversionError: values of a tensor are missing or were written twice.
        """
        wrong = [name for name, missing in self._missing.items() if missing]
        if wrong:
            missing = self._missing[wrong[0]]
            what = f"{missing} values are missing" if missing > 0 else f"{-missing} values are stored twice"
            raise ConversionError(
                f"{wrong[0]}: {what} in the checkpoint ({len(wrong)} such tensors); take another checkpoint"
            )

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._descriptors:
            os.close(descriptor)


def _write(descriptor: int, data: memoryview, position: int) -> None:
    """Write all of `data`; one system call writes at most 2 GiB."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], position + done)
