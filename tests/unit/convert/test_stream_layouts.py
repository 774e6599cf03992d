"""A converted folder through N processes: loaded, saved, exported at TP x PP x VPP x CP; what others write.

The oracle is the source folder. Replicas fill what TP x PP leave of a job's processes.
"""

import argparse
import enum
import os
import shutil
from pathlib import Path

import pytest
import torch
from distributed_runner import new_job, run_distributed
from hf_families import FAMILIES, MIXTURES, family_model, family_run
from megatron.core import dist_checkpointing
from refusals import Payload
from safetensors.torch import load_file
from training_runs import build_stages
from upstream_saver import let_upstream_save

from patch.checkpoint import save_checkpoint
from patch.compat.unpickle import read_metadata
from patch.convert import export_hf, hf_to_mcore, mcore_to_hf
from patch.errors import PatchError
from patch.model import sharded_weights
from patch.training.run_state import load_weights

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]  # the first test converts all models

JOBS = {
    4: [(1, 1, 0), (1, 2, 0), (2, 1, 0), (2, 2, 0), (4, 1, 0), (1, 2, 1), (2, 2, 1), (2, 2, "E|tt|tt|L")],
    6: [(1, 3, 0), (2, 3, 0), (2, 3, 1)],
    8: [(4, 2, 0), (4, 2, 1), (2, 2, "Et|tt|t|L")],
    12: [(4, 3, 0)],
}
"""By processes: TP, PP, and layers of an interleaved stage or stages by hand; four layers, so PP=3 is uneven.
Interleaved PP=3 takes six."""
CP = {(1, 1, 0): 4, (2, 1, 0): 2, (1, 2, 1): 2, (2, 2, "Et|tt|t|L"): 2}
"""Of the layouts whose replicas share sequences."""
LAYOUTS = [layout for layouts in JOBS.values() for layout in layouts]
LEGACY = [(2, 2, 0), (2, 3, 0), (2, 2, 1), (2, 2, "E|tt|tt|L")]
FOREIGN = {
    "one-key-a-layer": ("", {"non_homogeneous_layers": True}),
    "gate-and-up-apart": ("", {"singleton_local_shards": True}),
    "prefix": ("module.", {}),
    "prefix, one-key-a-layer": ("module.language_model.", {"non_homogeneous_layers": True}),
}
"""Name -> prefix of the keys and what upstream's sharded_state_dict is told."""
EXPERTS = {
    "sequence_parallel": True, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1,
}  # fmt: skip
"""Ranks that share other layers have different experts."""
FAMILY = {"num_hidden_layers": 4, "num_key_value_heads": 4}
SOURCES = (*FAMILIES, *MIXTURES, "source", "six layers")
"""Folders: one of each family, and larger ones that go through all layouts."""


class Backend(enum.Enum):
    """Stands for the enums of Megatron-LM that its checkpoints hold."""

    AUTO = 1


def name_of(layout: tuple[int, int, int | str]) -> str:
    return "tp{}-pp{}-vpp{}".format(*layout).replace("|", "_")


def source_of(layout: tuple[int, int, int | str]) -> str:
    _, pp, stage = layout
    return "six layers" if stage and pp == 3 else "source"


def cut_of(stage: int | str) -> dict[str, int | str]:
    is_number = isinstance(stage, int)
    return {"num_layers_per_virtual_pipeline_stage" if is_number else "pipeline_model_parallel_layout": stage}


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


def _pass_through(rank: int, world_size: int, root: Path, tokenizer) -> None:
    """In each layout load what was converted as position 22 does, export and save it; also as others do."""
    for layout in JOBS[world_size]:
        for source in (*FAMILIES, *MIXTURES, "source") if layout == (2, 2, 0) else (source_of(layout),):
            new_job()
            (tp, pp, stage), cp = layout, CP.get(layout, 1)
            config = family_run(
                root / source, tp, pp, world_size // (tp * pp * cp), cp=cp, cp_comm_type="p2p",
                make_vocab_size_divisible_by=48, precision="bf16", **cut_of(stage),
                **(EXPERTS if source in MIXTURES else {}),
            )  # fmt: skip
            groups, stages = build_stages(config)
            mcore, out = root / f"{source}-mcore", root / f"{source}-{name_of(layout)}"
            load_weights(mcore, stages, config)
            export_hf(stages, out, config.model, groups, hf_source=mcore, tokenizer=tokenizer)
            save_checkpoint(Path(f"{out}-saved"), 3, {"model": sharded_weights(stages)}, {"iteration": 3})
        if layout in LEGACY:
            _write_legacy(stages, root / f"legacy-{name_of(layout)}", groups)
        if layout == (2, 3, 0):
            let_upstream_save()
            for name, (prefix, metadata) in FOREIGN.items():
                if rank == 0:
                    (root / name).mkdir()
                torch.distributed.barrier()
                model = stages[0].sharded_state_dict(prefix, metadata=metadata)
                dist_checkpointing.save({"model": model, "iteration": 3}, str(root / name))


@pytest.fixture(scope="module")
def root(tmp_path_factory, tiny_tokenizer) -> Path:
    root = tmp_path_factory.mktemp("layouts")
    family_model("qwen-3", root / "source", dtype=torch.bfloat16, **FAMILY)
    family_model("qwen-3", root / "six layers", dtype=torch.bfloat16, **FAMILY | {"num_hidden_layers": 6})
    for name in (*FAMILIES, *MIXTURES):
        family_model(name, root / name, dtype=torch.bfloat16)
    for name in SOURCES:
        hf_to_mcore(root / name, root / f"{name}-mcore")
    for processes in JOBS:
        run_distributed(_pass_through, processes, root, tiny_tokenizer(), timeout_s=600)
    return root


def check_equal(target: Path, root: Path, source: str = "source") -> None:
    before, after = load_file(root / source / "model.safetensors"), {}
    for path in target.glob("*.safetensors"):
        after |= load_file(path)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype == torch.bfloat16 and torch.equal(tensor, after[name]), name


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_every_layout_exports_and_saves_what_was_converted(root, layout, tmp_path):
    source = source_of(layout)
    out = root / f"{source}-{name_of(layout)}"
    check_equal(out, root, source)
    mcore_to_hf(Path(f"{out}-saved"), tmp_path / "hf", root / source)
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == (
        root / source / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("name", [*FAMILIES, *MIXTURES])
def test_every_family_passes_through_a_sharded_model(root, name, tmp_path):
    out = root / f"{name}-{name_of((2, 2, 0))}"
    check_equal(out, root, name)
    mcore_to_hf(Path(f"{out}-saved"), tmp_path / "hf", root / name)
    check_equal(tmp_path / "hf", root, name)


@pytest.mark.parametrize("layout", LEGACY, ids=name_of)
def test_legacy_checkpoint_of_every_layout_is_read(root, layout, tmp_path):
    mcore_to_hf(root / f"legacy-{name_of(layout)}", tmp_path / "hf", root / "source")
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
    for path in (root / "legacy-tp2-pp2-vpp0").rglob("*.pt"):
        contents = torch.load(path, weights_only=False)
        state = contents["model"]
        for key in [key for key in state if "decoder.final_layernorm" in key]:
            state[key.removeprefix("decoder.")] = state.pop(key)
        contents["args"] = Payload(tmp_path / "ran")
        target = tmp_path / "pai" / path.relative_to(root / "legacy-tp2-pp2-vpp0")
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
    folder = shutil.copytree(root / "legacy-tp2-pp2-vpp0", tmp_path / "legacy")
    damage(folder / "release" / "mp_rank_01_000" / "model_optim_rng.pt")
    with pytest.raises(PatchError, match=message) as refused:
        mcore_to_hf(folder, tmp_path / "hf", root / "source")
    assert refused.value.exit_code == 4 and not (tmp_path / "hf").exists()
