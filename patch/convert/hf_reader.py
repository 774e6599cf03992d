"""Reads a Hugging Face folder lazily: all headers at the start, values only of the requested slices.

Each access maps the file and unmaps it afterwards, so that read pages do not stay in this process's memory.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from patch.compat.unpickle import load_plain
from patch.config.schema import ModelConfig
from patch.convert.weight_table import weights_table
from patch.device import is_finite
from patch.errors import ConversionError
from patch.families.deepseek import BLOCK_SCALES
from patch.families.weights import EMBEDDING_PARAMETER, OUTPUT, HFTensor
from patch.logger import get_logger
from patch.preflight.weight_files import TensorHeader, WeightHeaders, check_headers, reading

_logger = get_logger(__name__)
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Readable dtypes by their safetensors names."""
SPELLINGS = {dtype: spelling for spelling, dtype in DTYPES.items()}
_ROWS = 4096
"""Rows that are compared at a time."""


class _Slice(NamedTuple):
    """A lazy slice of a tensor, or of its part of a stacked tensor; values must be finite."""

    tensor: Any
    header: TensorHeader
    scales: Any = None
    """Lazy slice of the scales of the blocks of a weight in 8 bits, which becomes bf16, or None."""

    def __getitem__(self, index: Any) -> torch.Tensor:  # type: ignore[override]
        """Read rows, or rows and columns.

        Raises:
            ConversionError: a value is NaN or infinite.
        """
        stacked, part = self.header.stacked, None
        if stacked is None or stacked.expert is None:
            part = self.tensor[index]
        else:
            rows, *columns = index if isinstance(index, tuple) else (index,)
            start, stop, _ = rows.indices(self.header.shape[0])
            first = stacked.part * self.header.shape[0]
            part = self.tensor[stacked.expert, first + start : first + stop, *columns]
        assert isinstance(part, torch.Tensor)
        if self.scales is not None:
            parts = index if isinstance(index, tuple) else (index, slice(None))
            numbers = (torch.arange(size)[of] for of, size in zip(parts, self.header.shape, strict=True))
            row_blocks, column_blocks = (each // BLOCK_SCALES.size for each in numbers)
            scales = self.scales[:][row_blocks[:, None], column_blocks]
            part = (part.float() * scales.float()).bfloat16()
        if not is_finite(part):
            raise ConversionError(
                f"{self.header.stored_name} in {self.header.path} has values that are NaN or infinite, "
                "expected finite ones: copy or download it again, or take the weights of an earlier step"
            )
        return part


class HFFolder(WeightHeaders):
    """The tensors of a Hugging Face folder by name; see WeightHeaders."""

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor that `check` has found."""
        return DTYPES[self._headers[name].dtype]

    def __getitem__(self, name: str) -> Any:
        """Return a lazy slice of a tensor; indexing it reads the values."""
        header = self._headers[name]
        scales = None if header.scales is None else _lazy(header.scales)
        return _Slice(_lazy(header), header, scales)

    def _read(self, path: Path) -> dict[str, TensorHeader]:
        if path.suffix == ".safetensors":
            return super()._read(path)
        return {
            name: TensorHeader(path, name, tuple(each.shape), SPELLINGS.get(each.dtype, str(each.dtype)))
            for name, each in _open(path).items()
        }

    def check_copy(self, name: str, original: str) -> None:
        """Compare a tensor part by part with the tensor it is tied to, if both are stored.

        Raises:
            ConversionError: the stored copy differs, or its dtype cannot be read.
        """
        if name not in self._headers:
            return
        self._check_tensor(HFTensor(name, self._headers[original].shape))
        for start in range(0, self._headers[original].shape[0], _ROWS):
            part = slice(start, start + _ROWS)
            if not torch.equal(self[name][part], self[original][part]):
                raise ConversionError(
                    f"{name} in {self.file_of(name)} differs from {original}, expected a copy of it since "
                    "config.json has tie_word_embeddings true: set that to false (as "
                    "transformers 5 takes it) and load again"
                )


def open_checked(folder: Path, model: ModelConfig, dtype: torch.dtype | None, flag: str) -> HFFolder:
    """Open a folder, check that it has the tensors of the model, and log if values will be rounded.

    Args:
        dtype: the target dtype of all weights, or None if each keeps its own.
        flag: the flag that sets this dtype, for the message.
    Raises:
        ConversionError: the folder cannot be read, or does not fit the model.
    """
    source = HFFolder(folder)
    check_headers(source, model)
    if not model.untie_embeddings_and_output_weights:
        (embedding,) = weights_table(model)[EMBEDDING_PARAMETER].hf
        source.check_copy(OUTPUT, embedding.name)
    if dtype is None or dtype == torch.float32:  # never rounds
        return source
    weights = [tensor.name for tensor in source.tensors if len(tensor.shape) > 1]  # not float32 buffers
    if inexact := {SPELLINGS[source.dtype_of(name)] for name in weights} - {SPELLINGS[dtype]}:
        _logger.warning(
            "weights stored as %s in %s are rounded to %s (%s)",
            ", ".join(sorted(inexact)), folder, str(dtype).removeprefix("torch."), flag,
        )  # fmt: skip
    return source


def _lazy(header: TensorHeader) -> Any:
    file, stored = _open(header.path), header.stored_name
    return file[stored] if isinstance(file, dict) else file.get_slice(stored)


def _open(path: Path) -> Any:
    if path.suffix == ".safetensors":
        with reading(path):
            return safe_open(str(path), framework="pt", device="cpu")
    with reading(path, "a torch.save file"):
        try:
            tensors = load_plain(path, "cpu", mmap=True)
        except pickle.UnpicklingError as error:
            raise ConversionError(f"{path} holds more than tensors and was not read") from error
    if not isinstance(tensors, dict) or not all(isinstance(v, torch.Tensor) for v in tensors.values()):
        raise ConversionError(f"{path} holds no dict of tensors, expected name -> tensor; download it again")
    return tensors
