"""A converted folder through a sharded model: loaded, saved, exported, handed over; what others write.

The oracle is the source folder.
"""

import argparse
import enum
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_runner import new_job, run_distributed
from hf_families import FAMILIES, MIXTURES, family_model, family_run
from megatron.core import dist_checkpointing
from refusals import Payload
from safetensors.torch import load_file
from training_runs import build_stages
from upstream_saver import let_upstream_save

from patch.checkpoint import load_only_weights, save_checkpoint, weights_folder
from patch.compat.unpickle import read_metadata
from patch.convert import export_hf, hf_to_mcore, iter_hf_weights, mcore_to_hf
from patch.convert.live_weights import Receivers
from patch.errors import PatchError
from patch.model import WEIGHT_PREFIXES, sharded_weights

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]  # the first test converts all models

FAMILY = {"num_hidden_layers": 4, "num_key_value_heads": 4}
SQUARE: dict[str, Any] = {"tp": 2, "pp": 2}
HALVES = {"sequence_parallel": True, "expert_model_parallel_size": 2}
"""Ranks that share other layers have different experts."""
EXPERTS: dict[str, dict[str, Any]] = {
    name: SQUARE | HALVES | {"expert_tensor_parallel_size": 1} for name in MIXTURES
} | {
    "qwen-2-moe-mixed": {"pp": 2, "dp": 2} | HALVES,
    "qwen-3-moe": {"tp": 2, "dp": 2} | HALVES | {"expert_tensor_parallel_size": 2},
    "mixtral": {"tp": 2, "dp": 2} | HALVES
    | {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1},
}  # fmt: skip
"""EP over TP, over DP with PP, with ETP, over TP and DP."""
JOBS: dict[int, dict[str, dict[str, Any]]] = {
    4: dict.fromkeys(FAMILIES, SQUARE) | EXPERTS | {
        "plain": SQUARE,
        "by hand": SQUARE | {"pipeline_model_parallel_layout": "E|tt|tt|L"},
        "CP": {"pp": 2, "cp": 2, "cp_comm_type": "p2p"},
        "TP": {"tp": 4},
    },
    3: {"uneven": {"pp": 3}},
}  # fmt: skip
"""By processes: the layouts, and what they are. Layouts of a family's name are of its model."""
CHANGES = JOBS[3] | JOBS[4]
LAYOUTS = [*CHANGES]
RECEIVERS: tuple[Receivers, ...] = ("all", "first", "stage")
LEGACY = ("plain", "by hand", "uneven")
FOREIGN = {
    "one-key-a-layer": ("", {"non_homogeneous_layers": True}),
    "gate-and-up-apart": ("", {"singleton_local_shards": True}),
    "prefix": ("module.", {}),
    "prefix, one-key-a-layer": ("module.language_model.", {"non_homogeneous_layers": True}),
}
"""Name -> prefix of the keys and what upstream's sharded_state_dict is told."""
SOURCES = (*FAMILIES, *MIXTURES, "source")


class Backend(enum.Enum):
    """Stands for the enums of Megatron-LM that its checkpoints hold."""

    AUTO = 1


def source_of(layout: str) -> str:
    return layout if layout in SOURCES else "source"


def _write_legacy(stages, folder: Path, groups) -> None:
    """What Megatron-LM's save_checkpoint wrote before torch_dist, by upstream's own state dicts."""
    if groups.dp_cp.rank() > 0:
        return
    tp, pp = groups.tp.rank(), groups.pp.rank()
    name = f"mp_rank_{tp:02d}_{pp:03d}" if groups.pp.size() > 1 else f"mp_rank_{tp:02d}"
    states = [stage.state_dict_for_save_checkpoint() for stage in stages]
    keys = ["model"] if len(states) == 1 else [f"model{index}" for index in range(len(states))]
    contents = dict(zip(keys, states, strict=True)) | {
        "args": argparse.Namespace(backend=Backend.AUTO, tensor_model_parallel_size=groups.tp.size()),
        "checkpoint_version": 3.0, "iteration": 100,
    }  # fmt: skip
    (folder / "release" / name).mkdir(parents=True)
    torch.save(contents, folder / "release" / name / "model_optim_rng.pt")


def _pass_through(
    rank: int, world_size: int, root: Path, tokenizer
) -> dict[str, dict[str, list[str]]]:
    """In each layout load what was converted as position 22 does, export and save it; also as others do.

    By layout and receivers: the names of the tensors that this rank got, all with the folder's values.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for layout, changes in JOBS[world_size].items():
        new_job()
        source = source_of(layout)
        config = family_run(
            root / source, **changes, make_vocab_size_divisible_by=48, precision="bf16"
        )
        groups, stages = build_stages(config)
        weights = {"model": sharded_weights(stages)}
        load_only_weights(
            weights_folder(root / f"{source}-mcore"), weights, prefixes=WEIGHT_PREFIXES,
            vocab_size=config.model.vocab_size,
        )  # fmt: skip
        how = {"hf_source": root / f"{source}-mcore", "tokenizer": tokenizer}
        export_hf(stages, root / f"{layout}-hf", config.model, groups, **how)
        save_checkpoint(root / f"{layout}-saved", 3, {"model": sharded_weights(stages)}, {"iteration": 3})
        stored, found[layout] = load_file(root / source / "model.safetensors"), {}
        for receivers in RECEIVERS:
            tensors = dict(iter_hf_weights(stages, config.model, groups, receivers=receivers))
            assert all(torch.equal(tensor, stored[name]) for name, tensor in tensors.items())
            found[layout][receivers] = list(tensors)
            for tensor in tensors.values():
                tensor.fill_(7)  # new tensors: the next receivers find the model as it was
        if layout in LEGACY:
            _write_legacy(stages, root / f"{layout}-legacy", groups)
        if layout == "plain":
            let_upstream_save()
            for name, (prefix, metadata) in FOREIGN.items():
                if rank == 0:
                    (root / name).mkdir()
                torch.distributed.barrier()
                model = stages[0].sharded_state_dict(prefix, metadata=metadata)
                dist_checkpointing.save({"model": model, "iteration": 3}, str(root / name))
    return found


@pytest.fixture(scope="module")
def passed(tmp_path_factory, tiny_tokenizer) -> tuple[Path, dict[str, list[dict[str, list[str]]]]]:
    """The folder, and by layout what each rank got."""
    root = tmp_path_factory.mktemp("layouts")
    family_model("qwen-3", root / "source", dtype=torch.bfloat16, **FAMILY)
    for name in (*FAMILIES, *MIXTURES):
        family_model(name, root / name, dtype=torch.bfloat16)
    for name in SOURCES:
        hf_to_mcore(root / name, root / f"{name}-mcore")
    found = {}
    for number in JOBS:
        ranks = run_distributed(_pass_through, number, root, tiny_tokenizer(), timeout_s=600)
        found |= {layout: [rank[layout] for rank in ranks] for layout in JOBS[number]}
    return root, found


@pytest.fixture(scope="module")
def root(passed) -> Path:
    return passed[0]


def check_equal(target: Path, root: Path, source: str = "source") -> None:
    before, after = load_file(root / source / "model.safetensors"), {}
    for path in target.glob("*.safetensors"):
        after |= load_file(path)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_family_exports_and_saves_what_was_converted(root, layout, tmp_path):
    source = source_of(layout)
    check_equal(root / f"{layout}-hf", root, source)
    mcore_to_hf(root / f"{layout}-saved", tmp_path / "hf", root / source)
    stored, back = (folder / "model.safetensors" for folder in (root / source, tmp_path / "hf"))
    assert back.read_bytes() == stored.read_bytes()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_receivers_get_every_tensor_or_those_of_their_stage(passed, layout):
    root, found = passed
    (names, *others), first, stage = ([rank[each] for rank in found[layout]] for each in RECEIVERS)
    assert {*names} == load_file(root / source_of(layout) / "model.safetensors").keys()
    assert others == [names] * len(others)
    stages = [got for got in stage if got]
    replicas = len(stages) / CHANGES[layout].get("pp", 1)
    assert first.count(names) == replicas and first.count([]) == len(first) - replicas
    assert sorted(sum(stages, [])) == sorted(names * int(replicas))


@pytest.mark.parametrize("layout", LEGACY)
def test_legacy_checkpoint_of_every_layout_is_read(root, layout, tmp_path):
    mcore_to_hf(root / f"{layout}-legacy", tmp_path / "hf", root / "source")
    check_equal(tmp_path / "hf", root)
    assert (tmp_path / "hf" / "config.json").read_bytes() == (root / "source" / "config.json").read_bytes()


@pytest.mark.parametrize("name", FOREIGN)
def test_other_spellings_of_torch_dist_are_read(root, name, tmp_path):
    keys = read_metadata(root / name / ".metadata").state_dict_metadata
    assert all(key.startswith(FOREIGN[name][0]) for key in keys)
    mcore_to_hf(root / name, tmp_path / "hf", root / "source")
    check_equal(tmp_path / "hf", root)


def test_last_norm_outside_of_the_decoder_is_read(root, tmp_path):
    """Pai-Megatron-Patch's LLaMA; and a hostile object in the file stays lifeless."""
    for path in (root / "plain-legacy").rglob("*.pt"):
        contents = torch.load(path, weights_only=False)
        state = contents["model"]
        for key in [key for key in state if "decoder.final_layernorm" in key]:
            state[key.removeprefix("decoder.")] = state.pop(key)
        contents["args"] = Payload(tmp_path / "ran")
        target = tmp_path / "pai" / path.relative_to(root / "plain-legacy")
        target.parent.mkdir(parents=True)
        torch.save(contents, target)
    mcore_to_hf(tmp_path / "pai", tmp_path / "hf", root / "source")
    check_equal(tmp_path / "hf", root)
    assert not (tmp_path / "ran").exists()


def _lacking(path: Path) -> None:
    contents = torch.load(path, weights_only=False)
    del contents["model"]["decoder.layers.1.mlp.linear_fc2.weight"]
    torch.save(contents, path)


def _malformed(path: Path) -> None:
    contents, called = path.read_bytes(), b"torch._utils\n_rebuild_"
    assert called + b"tensor_v2" in contents
    path.write_bytes(contents.replace(called + b"tensor_v2", called + b"parameter"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_malformed, r"mp_rank_01_000.model_optim_rng.pt cannot be read: malformed pickle"),
        (Path.unlink, "lacks model_optim_rng.pt of TP rank 1, stage 0"),
        (lambda path: os.truncate(path, 5000), r"mp_rank_01_000.model_optim_rng.pt cannot be read"),
        (_lacking, r"lacks decoder\.layers\.\*\.mlp\.linear_fc2\.weight of layer 1 at TP rank 1"),
    ],
)
def test_damaged_legacy_checkpoint_is_refused(root, tmp_path, damage, message):
    folder = shutil.copytree(root / "plain-legacy", tmp_path / "legacy")
    damage(folder / "release" / "mp_rank_01_000" / "model_optim_rng.pt")
    with pytest.raises(PatchError, match=message) as refused:
        mcore_to_hf(folder, tmp_path / "hf", root / "source")
    assert refused.value.exit_code == 4 and not (tmp_path / "hf").exists()
