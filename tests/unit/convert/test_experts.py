"""Experts in folders and checkpoints: every spelling, there and back; what names an expert twice.

The oracle is the folder that transformers wrote.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_runner import new_job, run_distributed
from hf_families import MIXTURES, family_model, family_run
from safetensors.torch import load_file, save_file
from training_runs import build_stages

from patch.checkpoint import save_checkpoint
from patch.convert import ConversionError, hf_to_mcore, mcore_to_hf, offline
from patch.convert.live_weights import export_hf, import_hf, iter_hf_weights
from patch.model import sharded_weights
from patch.preflight.weight_files import WeightHeaders, check_headers
from toolkits.inspect_checkpoint import main


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", MIXTURES)
def test_way_back_of_several_files_is_the_source_byte_for_byte(tmp_path, monkeypatch, name):
    monkeypatch.setattr(offline, "WINDOW_BYTES", 5000)
    family_model(name, tmp_path / "hf", max_shard_size="60KB")
    hf_to_mcore(tmp_path / "hf", tmp_path / "mcore")
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(tmp_path / "hf")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    assert main([str(tmp_path / "mcore")]) == 0


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


LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "EP over DP, PP": ("qwen-2-moe-mixed", {"pp": 2, "dp": 2, "expert_model_parallel_size": 2}),
    "EP and ETP": (
        "qwen-3-moe", {"tp": 2, "dp": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
    ),
    "EP over TP and DP": (
        "mixtral", {"tp": 2, "dp": 2, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}
    ),
}  # fmt: skip


def _live(rank: int, world_size: int, root: Path, tokenizer: Any) -> dict[str, dict[str, int]]:
    """By layout and receivers: how many tensors this rank got, all with the folder's values."""
    found: dict[str, dict[str, int]] = {}
    for layout, (name, changes) in LAYOUTS.items():
        config = family_run(root / name, **changes, sequence_parallel=True)
        groups, stages = build_stages(config)
        import_hf(stages, root / name, config.model, groups)
        stored, found[layout] = load_file(root / name / "model.safetensors"), {}
        for receivers in ("all", "first", "stage"):
            tensors = dict(iter_hf_weights(stages, config.model, groups, receivers=receivers))
            assert all(torch.equal(tensor, stored[each]) for each, tensor in tensors.items())
            found[layout][receivers] = len(tensors)
        how = {"hf_source": root / name, "tokenizer": tokenizer}
        export_hf(stages, root / f"{layout} live", config.model, groups, **how)
        save_checkpoint(root / f"{layout} saved", 3, {"model": sharded_weights(stages)}, {"iteration": 3})
        new_job()
    return found


@pytest.fixture(scope="module")
def live(tmp_path_factory, tiny_tokenizer) -> tuple[Path, list[dict[str, dict[str, int]]]]:
    root = tmp_path_factory.mktemp("live")
    for name, _ in LAYOUTS.values():
        family_model(name, root / name)
    return root, run_distributed(_live, 4, root, tiny_tokenizer())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_distributed_experts_are_gathered_exported_and_saved(live, layout, tmp_path):
    root, ranks = live
    stored = load_file(root / LAYOUTS[layout][0] / "model.safetensors")
    counts = [found[layout] for found in ranks]
    assert all(each["all"] == len(stored) for each in counts)
    of_tp_rank_0 = [index for index, each in enumerate(counts) if each["stage"]]
    num_stages = LAYOUTS[layout][1].get("pp", 1)
    assert [each["first"] for each in counts].count(len(stored)) == len(of_tp_rank_0) / num_stages
    assert sum(each["stage"] for each in counts) == len(stored) * len(of_tp_rank_0) / num_stages
    mcore_to_hf(root / f"{layout} saved", tmp_path / "hf", root / LAYOUTS[layout][0])
    for folder in (root / f"{layout} live", tmp_path / "hf"):
        found = {}
        for path in folder.glob("*.safetensors"):
            found |= load_file(path)
        assert found.keys() == stored.keys()
        assert all(torch.equal(tensor, stored[each]) for each, tensor in found.items())
