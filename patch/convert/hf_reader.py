"""Reads a Hugging Face folder lazily: all headers at the start, values only of the requested slices.

Each access maps the file again and unmaps it afterwards, so that pages that were read do not stay in the
memory of this process.
"""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Collection
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from patch.compat.unpickle import load_plain
from patch.config.schema import ModelConfig
from patch.convert.mappings import HFTensor
from patch.convert.weight_table import OUTPUT, hf_tensors, weights_table
from patch.errors import ConversionError, nearest
from patch.families import StackedPart, stacked_part
from patch.families.weights import EMBEDDING_PARAMETER
from patch.logger import get_logger
from patch.storage.names import (
    ADAPTER_WEIGHTS_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)
from patch.storage.places import open_to_read
from patch.storage.text_files import read_small

_logger = get_logger(__name__)
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Types that can be read, in safetensors' spelling."""
SPELLINGS = {dtype: spelling for spelling, dtype in DTYPES.items()}
_MODEL_CURE = ("model_size auto takes the shape from config.json", "model_size")
_ADAPTER_CURE = ("give the model that it is an adapter of", "load")
"""What cures tensors that do not fit, and the field that does."""
_ROWS = 4096
"""Rows that are compared at a time."""
_DERIVED = "rotary_emb.inv_freq"
"""Old folders store these RoPE frequencies; they follow from config.json."""
_LFS_POINTER = b"version https://git-lfs"


class _TensorHeader(NamedTuple):
    path: Path
    stored_name: str
    shape: tuple[int, ...]
    dtype: str
    """In safetensors' spelling."""
    stacked: StackedPart | None = None
    """Where it is, if not under its own name."""


class _StackedSlice(NamedTuple):
    """A lazy slice of one expert's matrix in a tensor of all experts."""

    tensor: Any
    expert: int
    first: int
    """Its first row there."""
    num_rows: int

    def __getitem__(self, index: Any) -> torch.Tensor:  # type: ignore[override]
        """The values of rows, or of rows and columns."""
        rows, *columns = index if isinstance(index, tuple) else (index,)
        start, stop, _ = rows.indices(self.num_rows)
        part = self.tensor[self.expert, self.first + start : self.first + stop, *columns]
        assert isinstance(part, torch.Tensor)
        return part


class HFFolder:
    """The tensors of a Hugging Face folder by name.

    Args:
        folder: the folder.
        adapter: it is one of PEFT.
    Raises:
        ConversionError: the folder holds neither safetensors nor .bin files, or one is missing or broken.
    """

    def __init__(self, folder: Path, *, adapter: bool = False) -> None:
        self.folder = folder
        self._cure, self._field = _ADAPTER_CURE if adapter else _MODEL_CURE
        self.tensors: list[HFTensor] = []
        """The tensors that a model needs; set by `check` when it has found them all."""
        self._headers: dict[str, _TensorHeader] = {}
        for path in [_adapter_file(folder)] if adapter else _weight_files(folder):
            found = _headers(path)
            if twice := found.keys() & self._headers.keys():
                name = min(twice)
                raise ConversionError(
                    f"{path} holds {name}, and so does {self._headers[name].path.name}; expected each tensor "
                    "in one file"
                )
            self._headers |= found

    def dtype_of(self, name: str) -> torch.dtype:
        """The type of a tensor that `check` has found."""
        return DTYPES[self._headers[name].dtype]

    def __getitem__(self, name: str) -> Any:
        """A lazy slice of a tensor: indexing it reads the values."""
        header = self._headers[name]
        file, stacked = _open(header.path), header.stacked
        stored = header.stored_name
        tensor = file[stored] if isinstance(file, dict) else file.get_slice(stored)
        if stacked is None or stacked.expert is None:
            return tensor
        return _StackedSlice(tensor, stacked.expert, stacked.part * header.shape[0], header.shape[0])

    def file_of(self, name: str) -> Path:
        """The file that contains a tensor."""
        return self._headers[name].path

    def check(self, expected: list[HFTensor], *, unused: frozenset[str] = frozenset()) -> None:
        """Compare names, shapes and types with what a model needs; reads headers only.

        Args:
            expected: the tensors of the model.
            unused: tensors that are allowed but not needed.
        Raises:
            ConversionError: a tensor is missing, unexpected, of another shape or of an unreadable type.
        """
        names = whole_names(self._headers, expected[0].name)
        self._headers = {names[name]: header for name, header in self._headers.items()}
        used: set[str] = set()
        for tensor in expected:
            if (stacked := stacked_part(tensor.name)) and tensor.name not in self._headers:
                used |= self._take(tensor, stacked)
            self._check_tensor(tensor)
        known = {tensor.name for tensor in expected} | unused | used
        extra = [name for name in self._headers if name not in known and not name.endswith(_DERIVED)]
        if extra:
            header = self._headers[extra[0]]
            raise ConversionError(
                f"{header.path} holds {extra[0]} (shape {header.shape}), which this "
                f"model has no place for ({len(extra)} such tensors); expected a model of the "
                f"configured family and layers: {self._cure}",
                field=self._field,
            )
        self.tensors = expected

    def _take(self, tensor: HFTensor, stacked: StackedPart) -> set[str]:
        """Find a tensor where transformers 5 has it in memory; the names that were used."""
        header = self._headers.get(stacked.name)
        if header is None:
            return set()
        shape = header.shape
        if stacked.expert is not None:
            is_both = stacked.name.endswith("gate_up_proj")
            rows = shape[1] // (1 + is_both) if len(shape) == 3 and stacked.expert < shape[0] else 0
            shape = (rows, *shape[2:])
        self._headers[tensor.name] = header._replace(shape=shape, stacked=stacked)
        return {stacked.name}

    def check_copy(self, name: str, original: str) -> None:
        """Compare a tensor with the one it is tied to, if both are stored; reads them part by part.

        Raises:
            ConversionError: the stored copy differs, or its type cannot be read.
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

    def _warn_of_rounding(self, dtype: torch.dtype, flag: str) -> None:
        """Log once if converting the checked tensors to this type may round values; float32 never does."""
        inexact = {self._headers[tensor.name].dtype for tensor in self.tensors} - {SPELLINGS[dtype]}
        if dtype != torch.float32 and inexact:
            _logger.warning(
                "weights stored as %s in %s are rounded to %s (%s)",
                ", ".join(sorted(inexact)), self.folder, str(dtype).removeprefix("torch."), flag,
            )  # fmt: skip

    def _check_tensor(self, tensor: HFTensor) -> None:
        if tensor.name not in self._headers:
            files = sorted({header.path.name for header in self._headers.values()})
            raise ConversionError(
                f"{self.folder} has no tensor {tensor.name} of shape {tensor.shape}; its "
                f"{len(self._headers)} tensors in {', '.join(files)} were "
                f"searched{nearest(tensor.name, sorted(self._headers))}"
            )
        header = self._headers[tensor.name]
        if header.shape != tensor.shape:
            raise ConversionError(
                f"{tensor.name} in {header.path} has shape {header.shape}, the model expects "
                f"{tensor.shape}: {self._cure}",
                field=self._field,
            )
        if header.dtype not in DTYPES:
            raise ConversionError(
                f"{tensor.name} in {header.path} is stored as {header.dtype}, expected one "
                f"of {', '.join(DTYPES)}: use the folder of the model that is not quantised"
            )


def whole_names(stored: Collection[str], embedding: str) -> dict[str, str]:
    """Stored name -> name in the whole model, for files that may be of one without its output layer.

    Args:
        stored: all names in the files; BigScience's have `word_embeddings.weight`.
        embedding: the embedding's in the whole model: `transformer.word_embeddings.weight`.
    """
    prefix, _, bare = embedding.partition(".")
    is_bare = embedding not in stored and bare in stored
    return {name: f"{prefix}.{name}" if is_bare and name != OUTPUT else name for name in stored}


def check_headers(folder: Path, model: ModelConfig) -> HFFolder:
    """Open a folder, and check by headers and sizes of its files that it has the tensors of the model.

    Raises:
        ConversionError: the folder cannot be read, or does not fit the model.
    """
    source = HFFolder(folder)
    tied = not model.untie_embeddings_and_output_weights
    source.check(hf_tensors(model), unused=frozenset({OUTPUT} if tied else ()))
    return source


def open_checked(folder: Path, model: ModelConfig, dtype: torch.dtype | None, flag: str) -> HFFolder:
    """Open a folder, check that it has the tensors of the model, and log if values will be rounded.

    Args:
        folder: the Hugging Face folder.
        model: the shape of the model.
        dtype: the type to which all weights are converted; None: each keeps its own.
        flag: the flag that sets this type, for the message.
    Raises:
        ConversionError: the folder cannot be read, or does not fit the model.
    """
    source = check_headers(folder, model)
    if not model.untie_embeddings_and_output_weights:
        (embedding,) = weights_table(model)[EMBEDDING_PARAMETER].hf
        source.check_copy(OUTPUT, embedding.name)
    if dtype is not None:
        source._warn_of_rounding(dtype, flag)
    return source


def _open(path: Path) -> Any:
    """An open safetensors file; for a torch.save file its memory-mapped tensors by name."""
    kind = "safetensors" if path.suffix == ".safetensors" else "a torch.save file"
    try:
        if path.suffix == ".safetensors":
            return safe_open(str(path), framework="pt", device="cpu")
        tensors = load_plain(path, "cpu", mmap=True)
    except pickle.UnpicklingError as error:
        raise ConversionError(f"{path} holds more than tensors and was not read") from error
    except (SafetensorError, OSError, RuntimeError, EOFError, ValueError) as error:
        if _is_pointer(path):
            raise ConversionError(f"{path} is a pointer of git-lfs: run git lfs pull") from error
        raise ConversionError(
            f"{path} ({path.stat().st_size} bytes) cannot be read as {kind}: {error}; expected a whole file: "
            "copy or download it again"
        ) from error
    if not isinstance(tensors, dict) or not all(isinstance(v, torch.Tensor) for v in tensors.values()):
        raise ConversionError(f"{path} holds something else than tensors by name")
    return tensors


def _is_pointer(path: Path) -> bool:
    try:
        with open_to_read(path) as file:
            return file.read(len(_LFS_POINTER)) == _LFS_POINTER
    except OSError:  # it cannot be read at all
        return False


def _headers(path: Path) -> dict[str, _TensorHeader]:
    file = _open(path)
    if isinstance(file, dict):
        return {
            name: _TensorHeader(
                path, name, tuple(tensor.shape), SPELLINGS.get(tensor.dtype, str(tensor.dtype))
            )
            for name, tensor in file.items()
        }
    slices = {name: file.get_slice(name) for name in file.keys()}
    return {
        name: _TensorHeader(path, name, tuple(lazy.get_shape()), lazy.get_dtype())
        for name, lazy in slices.items()
    }


def _adapter_file(folder: Path) -> Path:
    """The file of an adapter; PEFT has one, and none of another kind is opened."""
    file = folder / ADAPTER_WEIGHTS_NAME
    if not file.is_file():
        found = ", ".join(sorted(path.name for path in islice(folder.glob("adapter_model*"), 9))) or "nothing"
        raise ConversionError(
            f"{folder} has {found} of an adapter's weights, expected {ADAPTER_WEIGHTS_NAME}: save it anew "
            "with PEFT, which writes safetensors"
        )
    return file


def _weight_files(folder: Path) -> list[Path]:
    """The files with the weights; a single file is preferred over an index, as in transformers."""
    for single, index in ((SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME), (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)):
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            return _indexed_files(folder, index)
    raise ConversionError(
        f"{folder} holds neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}, nor {WEIGHTS_NAME} or "
        f"{WEIGHTS_INDEX_NAME}"
    )


def _indexed_files(folder: Path, index: str) -> list[Path]:
    file_names = read_index(folder / index)
    for name, file in file_names.items():
        if not (folder / file).is_file():
            count = list(file_names.values()).count(file)
            raise ConversionError(
                f"{folder / file} is missing; {index} places {name} and {count - 1} other tensors in it: "
                "copy or download it again"
            )
    return [folder / file for file in sorted(set(file_names.values()))]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; without this the last of several values of a name would count."""
    counts = Counter(name for name, _ in pairs)
    for name, number in counts.items():
        if number > 1:
            raise ValueError(f"it names {name} twice")
    return dict(pairs)


def read_index(path: Path) -> dict[str, str]:
    """The file name of each tensor, from an index in transformers' format.

    Raises:
        ConversionError: the index cannot be read, names a tensor twice, or a file outside of its folder.
    """
    try:
        file_names: dict[str, str] = json.loads(read_small(path), object_pairs_hook=_once)["weight_map"]
        outside = [file for file in file_names.values() if Path(file).name != file]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConversionError(f"{path} is no index of weights: {error!r}") from error
    if outside:
        raise ConversionError(f"{path} names a file outside of its folder: {outside[0]}")
    return file_names
