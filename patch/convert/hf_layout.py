"""The safetensors file of each tensor in a Hugging Face folder.

    known_layout     the layout of an existing folder
    divide           otherwise: files of up to 5 GiB, tensors in the given order
    name_files       the file names of transformers
    write_like       writes tensors with an existing layout, or a new one
    remember_layout  saves the layout in a converted checkpoint, to make the same files when converting back

A layout is a dict: tensor name -> file name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import torch

from patch.convert.hf_config_files import write_index
from patch.convert.hf_reader import HFFolder
from patch.convert.mappings import HFBlock, HFTensor
from patch.convert.safetensors_writer import SafetensorsWriter
from patch.convert.target_folder import writing
from patch.errors import ConversionError
from patch.families import stacked_part
from patch.preflight.weight_files import read_index, whole_names
from patch.progress import progress
from patch.storage.names import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from patch.storage.places import copy_of

FILE_BYTES = 5 * 2**30
"""Largest file, unless one tensor is larger."""


def known_layout(folder: Path | None, names: Sequence[str]) -> dict[str, str] | None:
    """Return the layout of the safetensors files in a folder, or None if it has none.

    Args:
        folder: a Hugging Face folder, a converted checkpoint, or None.
        names: the tensors of the model, the embedding first.
    Raises:
        ConversionError: the folder's index cannot be read, or lacks a tensor.
    """
    if folder is None:
        return None
    if (folder / SAFE_WEIGHTS_NAME).is_file():
        return dict.fromkeys(names, SAFE_WEIGHTS_NAME)
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if not index.is_file():
        return None
    stored = read_index(index)
    known = {whole: stored[name] for name, whole in whole_names(stored, names[0]).items()}
    for name in names:
        stacked = stacked_part(name)
        if name not in known and stacked is not None and stacked.name in known:
            known[name] = known[stacked.name]
    missing = [name for name in names if name not in known]
    if missing:
        raise ConversionError(
            f"{index} lacks {missing[0]} ({len(missing)} such tensors): copy or download it again"
        )
    layout = {name: known[name] for name in names}
    return layout if all(file.endswith(".safetensors") for file in layout.values()) else None


def divide(sizes: Mapping[str, int], file_bytes: int = FILE_BYTES) -> list[list[str]]:
    """Group consecutive tensor names into files of at most `file_bytes`; a larger tensor has its own file."""
    files: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not files or filled + size > file_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    return files


def name_files(files: Sequence[Sequence[str]]) -> dict[str, str]:
    """Return the layout of these files, with the file names of transformers."""
    return {
        name: SAFE_WEIGHTS_NAME if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        for number, names in enumerate(files, 1)
        for name in names
    }


def write_like(
    source: Path | None,
    folder: Path,
    dtypes: Mapping[HFTensor, torch.dtype],
    blocks: Iterable[HFBlock],
    title: str,
) -> None:
    """Write the weights of a model, with the layout of another folder, and their index.

    Args:
        source: the folder with the layout; without it or its safetensors, transformers' file names are used.
        folder: an existing folder.
        blocks: all values.
        title: the title of the progress bar.
    Raises:
        ConversionError: a file cannot be written, or values are missing.
    """
    sizes = {name: torch.Size(shape).numel() * dtype.itemsize for (name, shape), dtype in dtypes.items()}
    layout, total = known_layout(source, list(sizes)) or name_files(divide(sizes)), sum(sizes.values())
    with closing(SafetensorsWriter(folder, dtypes, layout)) as files, progress(title, total) as advance:
        for block in blocks:
            files.write(block)
            advance(block.values.nbytes)
        files.check_complete()
    if set(layout.values()) != {SAFE_WEIGHTS_NAME}:
        with writing(folder):
            write_index(folder, layout, total, source)


def remember_layout(source: HFFolder, checkpoint: Path) -> None:
    """Write the layout of a checked folder as an index into the checkpoint's folder."""
    index, copy = source.folder / SAFE_WEIGHTS_INDEX_NAME, checkpoint / SAFE_WEIGHTS_INDEX_NAME
    tensors = [*source.tensors, *source.further]
    layout = {tensor.name: source.file_of(tensor.name).name for tensor in tensors}
    is_whole = SAFE_WEIGHTS_NAME not in layout.values() and index.is_file()
    if is_whole and layout.keys() <= read_index(index).keys():
        copy_of(source.folder, SAFE_WEIGHTS_INDEX_NAME, copy)
        return
    copy.write_text(json.dumps({"weight_map": layout}, indent=2) + "\n")
