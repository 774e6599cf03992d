"""Experts in folders: what transformers has in memory is read; what names an expert twice is refused.

The oracle is the folder that transformers wrote.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hf_families import MIXTURES, family_model, family_run
from safetensors.torch import load_file, save_file

from patch.convert import ConversionError, hf_to_mcore, mcore_to_hf
from patch.preflight.weight_files import WeightHeaders, check_headers


@pytest.mark.long
@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("name", MIXTURES)
def test_what_transformers_5_has_in_memory_is_read(tmp_path, name, kind):
    model = family_model(name, tmp_path / "hf")
    by_disk = load_file(tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "model.safetensors").unlink()
    in_memory = {key: value.contiguous().clone() for key, value in model.state_dict().items()}
    assert not in_memory.keys() >= by_disk.keys()
    save = torch.save if kind.endswith("bin") else save_file
    save(in_memory, tmp_path / "hf" / kind)
    hf_to_mcore(tmp_path / "hf", tmp_path / "mcore")
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    found = {}
    for path in (tmp_path / "back").glob("*.safetensors"):
        found |= load_file(path)
    assert found.keys() == by_disk.keys()
    assert all(torch.equal(value, by_disk[key]) for key, value in found.items())


def _twice(root: Path) -> None:
    """An index in which a name of an expert is there twice."""
    index = root / "model.safetensors.index.json"
    name, file = next(
        (n, f) for n, f in json.loads(index.read_text())["weight_map"].items() if ".experts.3." in n
    )
    index.write_text(index.read_text().replace('"weight_map": {', f'"weight_map": {{ "{name}": "{file}",'))


def _in_two_files(root: Path) -> None:
    first, second, *_ = sorted(root.glob("*.safetensors"))
    save_file(load_file(first) | dict([next(iter(load_file(second).items()))]), first)


def _more(name: str, *shape: int) -> Callable[[Path], None]:
    """What adds a tensor to a layer."""

    def add(root: Path) -> None:
        first = min(root.glob("*.safetensors"))
        save_file(load_file(first) | {f"model.layers.0.{name}": torch.zeros(shape)}, first)

    return add


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_twice, r"is no index of weights.*names model\.layers\..*experts\.3\.\w+\.weight twice"),
        (_in_two_files, r"holds model.*, and so does model-00001.*expected each tensor in one file"),
        (
            _more("mlp.experts.down_proj", 4, 64, 96),
            r"holds model\.layers\.0\.mlp\.experts\.down_proj .*no place for",
        ),
        (_more("block_sparse_moe.experts.4.w1.weight", 96, 64), r"experts\.4\.\w+\.weight .*no place for"),
    ],
)
def test_expert_that_is_there_twice_or_too_many_is_refused(tmp_path, spoil, message):
    family_model("mixtral", tmp_path, max_shard_size="60KB")
    spoil(tmp_path)
    with pytest.raises(ConversionError, match=message):
        check_headers(WeightHeaders(tmp_path), family_run(tmp_path).model)
