"""safetensors files written block by block, and which tensor lies in which: against the libraries' own."""

import json
from contextlib import closing
from pathlib import Path

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file

from patch.convert.hf_layout import divide, known_layout, name_files
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
    with closing(_files(tmp_path)) as files:
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
    with closing(_files(tmp_path)) as files:
        for name, tensor in TENSORS.items():
            files.write(HFBlock(name, 0, 0, tensor[: len(tensor) - (name == "z")]))
        with pytest.raises(ConversionError, match=r"z: 2 values are missing .* \(1 such tensors\)"):
            files.check_complete()
        files.write(HFBlock("z", 5, 0, TENSORS["z"][5:]))
        with pytest.raises(ConversionError, match="z: 2 values are stored twice"):
            files.check_complete()


SIZES = {"a": 400, "b": 700, "c": 300, "d": 1000, "e": 100}
"""Bytes."""


@pytest.mark.parametrize("file_bytes", [1000, 1100, 2500, 3000])
def test_files_are_divided_and_named_as_the_library_does(file_bytes: int) -> None:
    tensors = {name: torch.zeros(size, dtype=torch.uint8) for name, size in SIZES.items()}
    expected = split_torch_state_dict_into_shards(
        tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=file_bytes
    )
    assert name_files(divide(SIZES, file_bytes)) == expected.tensor_to_filename
    assert divide(SIZES, 900) == [["a"], ["b"], ["c"], ["d"], ["e"]], "one above the limit is alone"


def _write_index(folder: Path, layout: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": layout}))


def test_layout_of_an_index_is_kept_for_the_tensors_asked_for(tmp_path: Path) -> None:
    layout = {"a": "x.safetensors", "b": "y.safetensors", "other": "x.safetensors"}
    _write_index(tmp_path, layout)
    assert known_layout(tmp_path, ["b", "a"]) == {"b": "y.safetensors", "a": "x.safetensors"}
    with pytest.raises(ConversionError, match=r"index\.json lacks c \(1 such tensors\)"):
        known_layout(tmp_path, ["a", "c"])
    (tmp_path / "model.safetensors").touch()
    assert known_layout(tmp_path, ["c"]) == {"c": "model.safetensors"}, "as transformers, one file wins"


def test_a_folder_without_safetensors_has_no_layout(tmp_path: Path) -> None:
    assert known_layout(None, ["a"]) is None and known_layout(tmp_path, ["a"]) is None
    _write_index(tmp_path, {"a": "pytorch_model.bin"})
    assert known_layout(tmp_path, ["a"]) is None
