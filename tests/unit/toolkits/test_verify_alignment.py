"""llama-patch align on checkpoints that are right, and on some wrong in one place."""

import contextlib
import dataclasses
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_runner import run_distributed
from hf_families import family_model, family_run
from peft_oracle import peft_model
from training_runs import CPU

from patch import compat
from patch.alignment import verify
from patch.checkpoint import save_checkpoint
from patch.config import to_yaml
from patch.convert import hf_to_mcore, import_hf
from patch.convert.hf_config_files import model_of
from patch.distributed.groups import alone
from patch.families.adapters import AdapterConfig
from patch.model import build_llama_model, sharded_weights
from toolkits.verify_alignment import main

SOURCES = {"rmsnorm", "rope", "swiglu", "qkv", "gate_up", "attention"}
KEYS = {
    "hf", "mcore", "device", "params_dtype", "attention", "prompt_lengths", "weights_equal",
    "weight_differences", "config_differences", "logits", "logits_aligned", "first_difference", "sources",
    "verdict", "normal", "parts",
}  # fmt: skip
"""Of a report; a contract."""
ALIKE = "mixtral"
"""A folder whose experts have nearly the same score."""


def _swap_gate_and_up(model: Any) -> None:
    weight = model.decoder.layers[1].mlp.linear_fc1.weight.data
    weight.copy_(torch.cat(weight.chunk(2)[::-1]))


def _change_bias(model: Any) -> None:
    model.decoder.layers[1].mlp.linear_fc2.bias.data += 1


def _convert(model: Any) -> None:
    """Not damage: the folder is made by toolkits.convert, not by a run."""


def _nothing(model: Any) -> None:
    pass


def _swap_experts_in_a_router(model: Any) -> None:
    weight = model.decoder.layers[1].mlp.router.weight.data
    weight.copy_(weight.roll(1, 0))


Case = tuple[str, dict[str, Any], Callable[[Any], None], dict[str, Any], dict[str, str]]
WHOLE = ("bf16", "theta", "parts")
CASES: dict[str, Case] = {
    # name: (family, fields of the run, damage to its weights, what its description says, further flags)
    "fp32": ("llama-3.1", {"precision": "fp32"}, _nothing, {}, {}),
    "bf16": ("llama-3.1", {"precision": "bf16"}, _nothing, {}, {"attention": "eager"}),
    "computed in bf16": ("llama-3.1", {"precision": "fp32"}, _nothing, {}, {"params-dtype": "bf16"}),
    "tied": ("llama-3.2", {"precision": "fp32"}, _nothing, {}, {}),
    "converted": ("mistral-0.1", {}, _convert, {}, {"attention": "eager"}),
    "experts": ("qwen-2-moe-mixed", {"precision": "fp32"}, _nothing, {}, {}),
    "experts alike": (ALIKE, {"precision": "bf16"}, _nothing, {}, {}),
    "router": ("qwen-2-moe-mixed", {"precision": "fp32"}, _swap_experts_in_a_router, {}, {}),
    "latent": ("deepseek-v2-lite", {"precision": "fp32"}, _nothing, {}, {}),
    "parts": ("gemma-2", {"precision": "fp32"}, _nothing, {}, {}),
    "bloom in fp32": ("bloom", {"precision": "fp32"}, _nothing, {}, {}),
    "bloom's bias": ("bloom", {"precision": "fp32"}, _change_bias, {}, {}),
    "gate and up": ("llama-3.1", {"precision": "fp32"}, _swap_gate_and_up, {}, {}),
    "theta": ("llama-3.1", {"precision": "fp32"}, _nothing, {"rotary_base": 10000.0}, {}),
}


def _save(folder: Path, hf: Path, case: Case) -> None:
    """A run's folder with a checkpoint made from the Hugging Face folder, and then damaged."""
    _, fields, damage, written, _ = case
    if damage is _convert:
        hf_to_mcore(hf, folder)
        return
    folder.mkdir()
    compat.apply(cuda=False)
    config = family_run(hf, **fields)
    with alone(CPU) as groups:
        stages = build_llama_model(config, groups, CPU.device)
        import_hf(stages, hf, config.model, groups)
        damage(stages[0])
        save_checkpoint(folder / "checkpoint", 3, {"model": sharded_weights(stages)}, {"iteration": 3})
    described = dataclasses.replace(config, model=dataclasses.replace(config.model, **written))
    (folder / "config.yaml").write_text(to_yaml(described))


def run_cases(rank: int, world_size: int, root: Path) -> dict[str, tuple[int, dict]]:
    """Exit code and report by case; the whole command line for two of them, whose output is a file."""
    found = {}
    for name, (family, *_, options) in CASES.items():
        hf, folder = root / family, root / name
        _save(folder, hf, CASES[name])
        if name in WHOLE:
            found[name] = _run_main(hf, folder, options)
        else:
            attention = options.get("attention", "sdpa")
            report = verify(hf, folder, precision=options.get("params-dtype"), attention=attention)
            found[name] = (0 if report.verdict.is_normal else 4, report.as_json())
    return found


def _run_main(hf: Path, folder: Path, options: dict[str, str]) -> tuple[int, dict]:
    report, output = folder / "report.json", io.StringIO()
    flags = [f"--{name}={value}" for name, value in options.items()]
    with contextlib.redirect_stdout(output):
        code = main(
            [f"--hf={hf}", f"--mcore={folder / 'checkpoint' / 'iter_0000003'}", f"--json={report}", *flags]
        )
    (folder / "output").write_text(output.getvalue())
    return code, json.loads(report.read_text())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of random weights for each family; the cases' own folders come beside them."""
    root = tmp_path_factory.mktemp("verify")
    for family in sorted({case[0] for case in CASES.values()}):
        if family != ALIKE:
            family_model(family, root / family)
    model = family_model(ALIKE, dtype=torch.bfloat16)
    for layer in model.model.layers:
        rows = layer.mlp.gate.weight.data
        rows[1:] = rows[:1]
        rows[1:, 0] *= torch.tensor([1.01, 1.02, 1.03])
    model.save_pretrained(root / ALIKE)
    return root


@pytest.fixture(scope="module")
def reports(root: Path) -> dict[str, tuple[int, dict]]:
    """What the toolkit answers for each case."""
    return run_distributed(run_cases, 1, root)[0]


@pytest.mark.parametrize("name", ["fp32", "bf16", "computed in bf16", "tied", "converted", "bloom in fp32"])
def test_a_right_checkpoint_is_normal(reports: dict, name: str) -> None:
    code, report = reports[name]
    assert code == 0
    assert report["normal"] and report["verdict"].startswith("Normal. All")
    assert report["weights_equal"] and report["config_differences"] == []
    assert report["logits_aligned"]["max"] == 0
    assert {*report} == KEYS and {*report["logits"]} == {"max", "mean", "cosine", "kl", "top1"}
    assert set(report["sources"]) == ({"layernorm", "gelu", "attention"} if "bloom" in name else SOURCES)
    assert max(report["prompt_lengths"]) > 64


@pytest.mark.parametrize("name", ["experts", "experts alike"])
def test_experts_are_compared_with_the_choices_of_transformers(reports: dict, name: str) -> None:
    code, report = reports[name]
    assert code == 0 and report["normal"] and report["weights_equal"]
    assert report["routes"]["tokens"] == 2 * sum(report["prompt_lengths"])
    assert report["logits_aligned"]["max"] == report["routes"]["differing"] == 0
    assert set(report["sources"]) == {*SOURCES, "experts"}
    if name == "experts alike":  # the fast form would choose others
        assert report["logits"]["cosine"] > 0.999 and "would go to other experts" in report["verdict"]
    else:
        assert report["logits"]["max"] < 1e-5


def test_a_wrong_router_is_no_tie(reports: dict) -> None:
    code, report = reports["router"]
    assert code == 4 and not report["normal"]
    assert "layers.1.mlp.gate.weight" in report["verdict"]
    assert "the weight of a router is wrong" in report["verdict"]
    assert report["routes"]["largest_gap"] > 0.1


def test_latent_attention_is_bit_equal_where_it_is_aligned(reports: dict) -> None:
    code, report = reports["latent"]
    assert code == 0 and report["logits_aligned"]["max"] == report["routes"]["differing"] == 0
    assert set(report["sources"]) == {*SOURCES, "experts"} - {"qkv"}
    assert 0 < report["logits"]["max"] < 1e-5


def test_bf16_names_what_the_fast_kernels_add(reports: dict) -> None:
    _, report = reports["bf16"]
    assert report["sources"]["rmsnorm"] > 1e-3
    assert report["sources"]["rope"] == report["sources"]["swiglu"] == 0
    first = report["first_difference"]
    assert (first["layer"], first["operation"]) == (0, "input_layernorm")
    assert "rounded to the checkpoint's type" in report["verdict"]
    assert 0.999 <= report["logits"]["cosine"] < 1


@pytest.mark.parametrize(
    ("name", "place", "operation"),
    [
        (
            "gate and up",
            "model.layers.1.mlp.gate_proj.weight holds the values of model.layers.1.mlp.up_proj.weight",
            "layer 1's gate_proj",
        ),
        ("theta", "rotary_base is 10000.0 in the checkpoint, 500000.0 by config.json", "rope"),
    ],
)
def test_a_fault_is_named_with_its_place(reports: dict, name: str, place: str, operation: str) -> None:
    code, report = reports[name]
    assert code == 4 and not report["normal"]
    assert report["verdict"].startswith("Not normal.") and place in report["verdict"]
    assert f"the first to differ is {operation} (by" in report["verdict"]


@pytest.mark.parametrize("name", WHOLE)
def test_table_verdict_and_plot_are_shown(reports: dict, root: Path, name: str) -> None:
    output = (root / name / "output").read_text()
    assert all(f"{source} fast" in output for source in (*reports[name][1]["sources"], "all"))
    assert "max |logit difference|, " in output and "top-1 equal in" in output
    assert output.endswith(reports[name][1]["verdict"] + "\n")
    assert (root / name / "report.png").stat().st_size > 1000


def test_parts_that_llama_lacks_are_named(reports: dict, root: Path) -> None:
    parts = {
        "activation": "gelu_pytorch_tanh", "norm_placement": "both", "layernorm_zero_centered_gamma": True,
        "window_attn_skip_freq": "2", "softmax_scale": 24**-0.5, "embedding_multiplier": 8.0,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
    }  # fmt: skip
    assert reports["parts"][1]["parts"] == parts and reports["parts"][1]["normal"]
    assert reports["bloom in fp32"][1]["parts"]["position_embedding_type"] == "alibi"
    assert reports["fp32"][1]["parts"] == {}
    output = (root / "parts" / "output").read_text()
    assert all(f"unlike LLaMA: {name} {value}\n" in output for name, value in parts.items())


BESIDE = {"llama-3.1": "in PEFT's model", "qwen-2-moe-mixed": "merged: .* would load only a part"}
"""Families, and how transformers' model has their adapters: PEFT's names of experts are told elsewhere."""


def run_adapters(rank: int, world_size: int, root: Path) -> list[dict]:
    compat.apply(cuda=False)
    found = []
    for family in BESIDE:
        mcore, run = (root / f"{family} {kind}" for kind in ("mcore", "run"))
        hf_to_mcore(root / family, mcore)
        found.append(verify(root / family, mcore, adapter=run).as_json())
    return found


@pytest.mark.long
def test_adapters_are_compared_in_both_models(root: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed: make test installs it")
    for family in BESIDE:
        adapter = AdapterConfig(lora_rank=4, lora_alpha=6)
        theirs = peft_model(root / family, model_of(root / family), adapter)
        theirs.save_pretrained(root / f"{family} run" / "adapter")
    for report, how in zip(run_distributed(run_adapters, 1, root)[0], BESIDE.values(), strict=True):
        assert report["normal"] and report["weights_equal"], report["verdict"]
        assert report["logits"]["max"] < 1e-5 and re.search(how, report["adapter"])
        assert "PEFT" not in report["adapter"] or report["logits_aligned"]["max"] == 0


def test_faults_of_weights_are_listed(reports: dict) -> None:
    names = {case: [found["name"] for found in reports[case][1]["weight_differences"]] for case in reports}
    assert names["gate and up"] == [f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up")]
    assert names["bloom's bias"] == ["transformer.h.1.mlp.dense_4h_to_h.bias"]
    assert names["theta"] == names["fp32"] == []


def test_wrong_folders_end_with_2_and_unreadable_ones_with_4(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for name, code, words in (("none", 2, "no config.json there"), ("x" * 300, 4, "File name too long")):
        assert main([f"--hf={tmp_path / name}", f"--mcore={tmp_path}"]) == code
        assert words in capsys.readouterr().err
