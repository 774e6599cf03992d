"""Layers that predict further tokens (DeepSeek-V3's MTP), which a conversion keeps and no run trains.

`hf_to_mcore` writes their tensors into one file beside the checkpoint; `mcore_to_hf` puts them back. Values
are copied bit by bit; only weights in 8 bits become bf16, as all others of such a folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

import torch

from patch.convert.hf_reader import HFFolder
from patch.convert.mappings import HFBlock
from patch.convert.safetensors_writer import SafetensorsWriter
from patch.families.weights import HFTensor
from patch.storage.names import MTP_FILE

_ROWS = 1024
"""Rows of a tensor that are copied at a time."""


def keep(source: HFFolder, target: Path) -> None:
    """Write the tensors of a checked folder's further layers, if it has any, into a checkpoint's folder."""
    dtypes = {tensor: source.dtype_of(tensor.name) for tensor in source.further}
    if not dtypes:
        return
    layout = dict.fromkeys((each.name for each in dtypes), MTP_FILE)
    with closing(SafetensorsWriter(target, dtypes, layout)) as file:
        for block in _blocks(source, dtypes):
            file.write(block)
        file.check_complete()


def kept(folder: Path | None) -> tuple[dict[HFTensor, torch.dtype], Iterator[HFBlock]]:
    """Return the tensors that `keep` wrote into a folder, and all their values; none without such a file."""
    if folder is None or not (folder / MTP_FILE).is_file():
        return {}, iter(())
    source = HFFolder(folder, files=[folder / MTP_FILE])
    dtypes = {tensor: source.dtype_of(tensor.name) for tensor in source.stored}
    return dtypes, _blocks(source, dtypes)


def _blocks(source: HFFolder, tensors: Iterable[HFTensor]) -> Iterator[HFBlock]:
    for name, shape in tensors:
        tensor = source[name]
        for row in range(0, shape[0], _ROWS):
            yield HFBlock(name, row, 0, tensor[row : row + _ROWS])
