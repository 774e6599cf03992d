"""Names, shapes and dtypes of the weights in a Hugging Face folder, from the headers of its files; no torch.

The launcher checks them before a process starts; `patch/convert` reads the values.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from patch.config.schema import ModelConfig, RunConfig
from patch.errors import ConversionError, about, nearest
from patch.families import StackedPart, stacked_part
from patch.families.adapters import PEFT_PREFIX, AdapterConfig, hf_tensors
from patch.families.deepseek import BLOCK_SCALES
from patch.families.weights import OUTPUT, HFTensor
from patch.preflight.checkpoint_places import existing_checkpoint_root
from patch.preflight.hub_names import first_weights
from patch.preflight.model_of_folder import further_layers
from patch.storage.names import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_WEIGHTS_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)
from patch.storage.places import open_to_read
from patch.storage.text_files import read_small

TYPES = ("F32", "BF16", "F16")
"""dtypes that can be read, in safetensors' spelling."""
_MODEL_CURE = ("model_size auto takes the shape from config.json", "model_size")
_ADAPTER_CURE = ("give the model that it is an adapter of", "lora_load")
"""Advice on tensors that do not fit, and the field to change."""
_DERIVED = "rotary_emb.inv_freq"
"""RoPE frequencies in old folders; they follow from config.json."""
_LFS_POINTER = b"version https://git-lfs"


class TensorHeader(NamedTuple):
    """A tensor's entry in the header of a file."""

    path: Path
    stored_name: str
    shape: tuple[int, ...]
    dtype: str
    stacked: StackedPart | None = None
    """Place in a stacked tensor, or None if the tensor is stored under its own name."""
    scales: TensorHeader | None = None
    """Scales of a weight in 8 bits, which is read as BF16; None for other tensors."""


class WeightHeaders:
    """Tensors of a Hugging Face folder by name, as the headers of its safetensors files describe them.

    Args:
        adapter: whether it is a PEFT folder.
        files: the files to read, or None for those that hold the weights.
    Raises:
        ConversionError: the folder holds neither safetensors nor .bin files, or a file is missing or broken.
    """

    def __init__(self, folder: Path, *, adapter: bool = False, files: list[Path] | None = None) -> None:
        self.folder = folder
        self._cure, self._field = _ADAPTER_CURE if adapter else _MODEL_CURE
        self.tensors: list[HFTensor] = []
        """Tensors that a model needs; set by `check` after it has found them all."""
        self.further: list[HFTensor] = []
        """Tensors of layers after the model's last, which predict further tokens (MTP); set by `check`."""
        self._headers: dict[str, TensorHeader] = {}
        if files is None:
            files = [_adapter_file(folder)] if adapter else _weight_files(folder)
        for path in files:
            found = self._read(path)
            if twice := found.keys() & self._headers.keys():
                name = min(twice)
                raise ConversionError(
                    f"{path} holds {name}, and so does {self._headers[name].path.name}; expected each tensor "
                    "in one file"
                )
            self._headers |= found

    def _read(self, path: Path) -> dict[str, TensorHeader]:
        """Return the headers of a file; only torch can read those of a .bin file."""
        with reading(path):
            file = safe_open(str(path), framework="np")
            slices = {name: file.get_slice(name) for name in file.keys()}
        return {
            name: TensorHeader(path, name, tuple(lazy.get_shape()), lazy.get_dtype())
            for name, lazy in slices.items()
        }

    @property
    def stored(self) -> list[HFTensor]:
        """All tensors of the files."""
        return [HFTensor(name, header.shape) for name, header in self._headers.items()]

    def file_of(self, name: str) -> Path:
        """Return the file that contains a tensor."""
        return self._headers[name].path

    def check(
        self, expected: list[HFTensor], *, unused: frozenset[str] = frozenset(), further: range = range(0)
    ) -> None:
        """Compare names, shapes and dtypes with the tensors that a model needs; reads headers only.

        Args:
            unused: tensors that are allowed but not needed.
            further: numbers of layers after the model's last, whose tensors become `further`.
        Raises:
            ConversionError: a tensor is missing, unexpected, of another shape or of an unreadable dtype.
        """
        names = whole_names(self._headers, expected[0].name)
        self._headers = {names[name]: header for name, header in self._headers.items()}
        used: set[str] = set()
        for tensor in expected:
            if (stacked := stacked_part(tensor.name)) and tensor.name not in self._headers:
                used |= self._take(tensor, stacked)
            self._check_tensor(tensor)
        layers = tuple(f"model.layers.{number}." for number in further)
        others = (each for each in sorted(self.stored) if each.name.startswith(layers))
        self.further = [tensor for tensor in others if not tensor.name.endswith(BLOCK_SCALES.suffix)]
        for tensor in self.further:
            self._check_tensor(tensor)
        known = {tensor.name for tensor in [*expected, *self.further]} | unused | used
        in_8_bits = (name for name, header in self._headers.items() if header.scales is not None)
        known |= {name + BLOCK_SCALES.suffix for name in in_8_bits}
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
        """Find a tensor inside a stacked tensor of transformers 5; return the stored names that were used."""
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

    def _check_tensor(self, tensor: HFTensor) -> None:
        if tensor.name not in self._headers:
            files = sorted({header.path.name for header in self._headers.values()})
            raise ConversionError(
                f"{self.folder} has no tensor {tensor.name} of shape {tensor.shape}; its "
                f"{len(self._headers)} tensors in {', '.join(files)} were "
                f"searched{nearest(tensor.name, sorted(self._headers))}"
            )
        header = self._headers[tensor.name]
        scales = self._headers.get(tensor.name + BLOCK_SCALES.suffix)
        blocks = tuple(-(-size // BLOCK_SCALES.size) for size in header.shape)
        if header.dtype == BLOCK_SCALES.dtype and scales is not None and scales.shape == blocks:
            header = self._headers[tensor.name] = header._replace(dtype="BF16", scales=scales)
        if header.shape != tensor.shape:
            raise ConversionError(
                f"{tensor.name} in {header.path} has shape {header.shape}, the model expects "
                f"{tensor.shape}: {self._cure}",
                field=self._field,
            )
        if header.dtype not in TYPES:
            raise ConversionError(
                f"{tensor.name} in {header.path} is stored as {header.dtype}, expected one "
                f"of {', '.join(TYPES)}: use the folder of the model that is not quantised"
            )


def check_start(config: RunConfig) -> None:
    """Check by headers that the weights with which a run begins exist and fit.

    Raises:
        ConversionError: the weights do not fit. Workers check .bin files and models that are fetched first.
    """
    with about("load"):
        folder, model = first_weights(config)
        if folder is not None and model is None and _weight_files(folder)[0].suffix == ".safetensors":
            check_headers(WeightHeaders(folder), config.model)
    load = config.adapter.lora_load  # workers check a run or its checkpoint
    if (
        load is not None
        and (Path(load) / ADAPTER_CONFIG_NAME).is_file()
        and existing_checkpoint_root(config) is None
    ):
        with about("lora_load"):
            check_adapter(WeightHeaders(Path(load), adapter=True), config.model, config.adapter)


def check_headers(source: WeightHeaders, model: ModelConfig) -> None:
    """Check that a folder has the tensors of a model; raises a ConversionError."""
    tied = not model.untie_embeddings_and_output_weights
    last = model.num_layers + further_layers(source.folder)
    unused = frozenset({OUTPUT} if tied else ())
    source.check(hf_tensors(model), unused=unused, further=range(model.num_layers, last))


def check_adapter(source: WeightHeaders, model: ModelConfig, adapter: AdapterConfig) -> None:
    """Check that a PEFT folder has all tensors of a model's adapters; raises a ConversionError."""
    source.check([HFTensor(PEFT_PREFIX + name, shape) for name, shape in hf_tensors(model, adapter)])


def whole_names(stored: Collection[str], embedding: str) -> dict[str, str]:
    """Return stored name -> name in the whole model; the files may be of a model without output layer.

    Args:
        stored: all names in the files; BigScience's files have `word_embeddings.weight`.
        embedding: the embedding's name in the whole model: `transformer.word_embeddings.weight`.
    """
    prefix, _, bare = embedding.partition(".")
    is_bare = embedding not in stored and bare in stored
    return {name: f"{prefix}.{name}" if is_bare and name != OUTPUT else name for name in stored}


@contextmanager
def reading(path: Path, kind: str = "safetensors") -> Iterator[None]:
    """Convert errors of a file's reader to ConversionErrors about this file."""
    try:
        yield
    except (SafetensorError, OSError, RuntimeError, EOFError, ValueError) as error:
        if isinstance(error, ConversionError):
            raise
        if _is_pointer(path):
            raise ConversionError(f"{path} is a pointer of git-lfs: run git lfs pull") from error
        raise ConversionError(
            f"{path} ({path.stat().st_size} bytes) cannot be read as {kind}: {error}; expected a whole file: "
            "copy or download it again"
        ) from error


def _is_pointer(path: Path) -> bool:
    try:
        with open_to_read(path) as file:
            return file.read(len(_LFS_POINTER)) == _LFS_POINTER
    except OSError:  # it cannot be read at all
        return False


def _adapter_file(folder: Path) -> Path:
    """Return the file of an adapter; a PEFT folder has one, and no other kind of file is opened."""
    file = folder / ADAPTER_WEIGHTS_NAME
    if not file.is_file():
        found = ", ".join(sorted(path.name for path in islice(folder.glob("adapter_model*"), 9))) or "nothing"
        raise ConversionError(
            f"{folder} has {found} of an adapter's weights, expected {ADAPTER_WEIGHTS_NAME}: save it anew "
            "with PEFT, which writes safetensors"
        )
    return file


def _weight_files(folder: Path) -> list[Path]:
    """Return the files with the weights; a single file is preferred over an index, as in transformers."""
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
    """Return a JSON object without duplicate names; JSON would keep the last of several values."""
    counts = Counter(name for name, _ in pairs)
    for name, number in counts.items():
        if number > 1:
            raise ValueError(f"it names {name} twice")
    return dict(pairs)


def read_index(path: Path) -> dict[str, str]:
    """Return the file name of each tensor, from an index in transformers' format.

    Raises:
        ConversionError: the index cannot be read, names a tensor twice, or names a file outside its folder.
    """
    try:
        file_names: dict[str, str] = json.loads(read_small(path), object_pairs_hook=_once)["weight_map"]
        outside = [file for file in file_names.values() if Path(file).name != file]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConversionError(f"{path} is no index of weights: {error!r}") from error
    if outside:
        raise ConversionError(f"{path} names a file outside of its folder: {outside[0]}")
    return file_names
