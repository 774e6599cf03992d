"""Which safetensors file each tensor of a Hugging Face folder lies in.

    known_layout     as an index that is there already says
    divide           else in files of 5 GiB, tensors in the order in which they are given
    name_files       under the names that transformers gives them
    remember_layout  in a converted checkpoint, so that the way back makes the same files again

A layout is a dict: tensor name -> file name.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from patch.convert.hf_reader import HFFolder, read_index
from patch.errors import ConversionError

FILE_BYTES = 5 * 2**30
"""Largest file, unless one tensor is larger."""


def known_layout(folder: Path | None, names: Sequence[str]) -> dict[str, str] | None:
    """The layout of the safetensors files in a folder; None where it has none.

    Args:
        names: the tensors that are asked for.
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
    known = read_index(index)
    lacking = [name for name in names if name not in known]
    if lacking:
        raise ConversionError(f"{index} lacks {lacking[0]} ({len(lacking)} such tensors)")
    layout = {name: known[name] for name in names}
    return layout if all(file.endswith(".safetensors") for file in layout.values()) else None


def divide(sizes: Mapping[str, int], file_bytes: int = FILE_BYTES) -> list[list[str]]:
    """Consecutive tensors, at most `file_bytes` together unless one alone is larger.

    Args:
        sizes: bytes by tensor name.
    Returns:
        the tensor names of each file.
    """
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
    """The layout of these files, named as transformers names them."""
    return {
        name: SAFE_WEIGHTS_NAME if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        for number, names in enumerate(files, 1)
        for name in names
    }


def remember_layout(source: HFFolder, checkpoint: Path) -> None:
    """Write which file of a checked folder each tensor lies in, as an index in the checkpoint's folder."""
    index, copy = source.folder / SAFE_WEIGHTS_INDEX_NAME, checkpoint / SAFE_WEIGHTS_INDEX_NAME
    layout = {tensor.name: source.file_of(tensor.name).name for tensor in source.tensors}
    if SAFE_WEIGHTS_NAME not in layout.values() and index.is_file():
        shutil.copyfile(index, copy)
        return
    copy.write_text(json.dumps({"weight_map": layout}, indent=2) + "\n")
