"""safetensors written block by block against the library's own files."""

import pytest
import torch
from safetensors.torch import save_file

from patch.convert.mappings import HFBlock, HFTensor
from patch.convert.safetensors_writer import SafetensorsWriter
from patch.errors import ConversionError

TENSORS = {
    "b": torch.randn(3, 4).bfloat16(), "a": torch.randn(5).half(), "z": torch.randn(7, 2),
    "c": torch.randn(3).bfloat16(), "d": torch.randn(6, 3).half(),
}  # fmt: skip


def _files(folder):
    dtypes = {HFTensor(name, tuple(tensor.shape)): tensor.dtype for name, tensor in TENSORS.items()}
    return SafetensorsWriter(folder, dtypes, dict.fromkeys(TENSORS, "ours.safetensors"))


def test_blocks_in_any_order_make_the_librarys_bytes(tmp_path):
    save_file(TENSORS, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    with _files(tmp_path) as files:
        for name in ("c", "z", "a", "d", "b"):
            tensor = TENSORS[name]
            if tensor.ndim == 1:
                files.write(HFBlock(name, 2, 0, tensor[2:]))
                files.write(HFBlock(name, 0, 0, tensor[:2]))
            else:
                files.write(HFBlock(name, 1, 0, tensor[1:, :1]))
                files.write(HFBlock(name, 1, 1, tensor[1:, 1:]))
                files.write(HFBlock(name, 0, 0, tensor[:1]))
        files.check_complete()
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


def test_missing_and_repeated_values_are_named(tmp_path):
    with _files(tmp_path) as files:
        for name, tensor in TENSORS.items():
            files.write(HFBlock(name, 0, 0, tensor[: len(tensor) - (name == "z")]))
        with pytest.raises(ConversionError, match=r"z lacks 2 values in the checkpoint \(1 such tensors\)"):
            files.check_complete()
        files.write(HFBlock("z", 5, 0, TENSORS["z"][5:]))
        with pytest.raises(ConversionError, match="z was stored with 2 values too many"):
            files.check_complete()
