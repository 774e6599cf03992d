"""Which file a tensor lies in: as the Hugging Face library divides and names, or as an index says."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards

from patch.convert.hf_layout import divide, known_layout, name_files
from patch.errors import ConversionError

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
