"""Layers that predict further tokens (DeepSeek-V3's MTP), which a conversion keeps and no run trains.

`hf_to_mcore` writes their tensors into one file beside the checkpoint; `mcore_to_hf` puts them back. Values
are copied bit by bit; only weights in fp8 become bf16, as all others of such a folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from patch.convert.hf_reader import DTYPES, HFFolder
from patch.convert.mappings import HFBlock
from patch.convert.safetensors_writer import SafetensorsWriter
from patch.families.weights import HFTensor
from patch.preflight.weight_files import reading
from patch.storage.names import MTP_FILE

_ROWS = 1024
"""Rows of a tensor that are copied at a time."""


def keep(source: HFFolder, target: Path) -> None:
    """Write the tensors of a checked folder's further layers, if it has any, into a checkpoint's folder."""
    dtypes = {tensor: source.dtype_of(tensor.name) for tensor in source.further}
    if not dtypes:
        return
    with SafetensorsWriter(target, dtypes, dict.fromkeys((each.name for each in dtypes), MTP_FILE)) as file:
        for name, shape in dtypes:
            tensor = source[name]
            for row in range(0, shape[0], _ROWS):
                file.write(HFBlock(name, row, 0, tensor[row : row + _ROWS]))
        file.check_complete()


class KeptLayers:
    """The tensors that `keep` wrote into a folder; none if it has no such file."""

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / MTP_FILE
        self.dtypes: dict[HFTensor, torch.dtype] = {}
        if self._path is None or not self._path.is_file():
            return
        with reading(self._path), safe_open(str(self._path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                lazy = file.get_slice(name)
                self.dtypes[HFTensor(name, (*lazy.get_shape(),))] = DTYPES[lazy.get_dtype()]

    def blocks(self) -> Iterator[HFBlock]:
        """Yield all values."""
        for name, shape in self.dtypes:
            with reading(Path(self._path or "")), safe_open(str(self._path), framework="pt") as file:
                tensor = file.get_slice(name)
                for row in range(0, shape[0], _ROWS):
                    yield HFBlock(name, row, 0, tensor[row : row + _ROWS])
