"""Adapters as PEFT's folders: read, written and merged at every layout, and what is refused of one.

The oracle is PEFT: its model beside the same tensors, its file, its merge.
"""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_runner import new_job, run_distributed
from hf_families import FAMILIES, MIXTURES, family_model, family_run
from safetensors.torch import load_file, save_file
from training_runs import build_stages, messages_from

from patch.convert import ConversionError, export_hf, import_hf
from patch.convert.hf_config_files import model_of
from patch.convert.live_adapters import export_adapter, import_adapter
from patch.convert.live_weights import iter_hf_weights
from patch.convert.merge import adapter_of, merge_adapter, open_adapter
from patch.errors import ConfigError
from patch.families.adapters import AdapterConfig, adapters_of, targets_are_there
from toolkits.merge import main

pytest.importorskip("peft", reason="peft is not installed: make test installs it")
from peft import PeftModel, get_peft_model_state_dict  # noqa: E402
from peft_oracle import peft_model  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

SECONDS = 10
"""Far more than any refusal takes, far less than a pattern or a rank that explodes."""
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
CASES = {
    "llama-2-70B": AdapterConfig(lora_rank=4, lora_alpha=6),
    "qwen-3": AdapterConfig(lora_rank=3, lora_rslora=True, lora_target_modules="q_proj,*.v_proj"),
    "bloom": AdapterConfig(lora_rank=2, lora_target_modules="dense,query_key_value"),
    "mixtral": AdapterConfig(lora_rank=4, lora_alpha=6),
    "qwen-2-moe-mixed": AdapterConfig(lora_rank=4, lora_target_modules="*.experts.*"),
    "qwen-3-moe": AdapterConfig(lora_rank=4, lora_alpha=6, lora_dropout=0.1),
    "deepseek-v2-lite": AdapterConfig(lora_rank=4, lora_alpha=6),
    "deepseek-v2": AdapterConfig(lora_rank=4, lora_target_modules="model.layers.*.self_attn.*"),
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each case the base, PEFT's own adapter of it, and PEFT's merge."""
    root = tmp_path_factory.mktemp("adapters")
    for name, adapter in CASES.items():
        family_model(name, root / name)
        found = peft_model(root / name, model_of(root / name), adapter)
        found.save_pretrained(root / f"{name} adapter")
        merged = {key: value.detach() for key, value in found.merge_and_unload().named_parameters()}
        save_file(merged, root / f"{name} merged.safetensors")
    return root


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def _equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", [*FAMILIES, *MIXTURES])
def test_all_linear_are_the_layers_and_the_parameters_of_peft(tmp_path: Path, name: str) -> None:
    family_model(name, tmp_path / "hf")
    model, adapter = model_of(tmp_path / "hf"), AdapterConfig(lora_rank=3)
    found = peft_model(tmp_path / "hf", model, adapter)
    expected = get_peft_model_state_dict(found)
    assert any(".down_proj." in key or ".w2." in key or "4h_to_h" in key for key in expected)
    found.save_pretrained(tmp_path / "adapter")
    source = open_adapter(tmp_path / "adapter", model, adapter_of(tmp_path / "adapter", model))
    assert {tensor.name: tensor.shape for tensor in source.tensors} == {
        k: v.shape for k, v in expected.items()
    }
    rows = [row for each in adapters_of(model, adapter) for row in (each.a, each.b)]
    assert sum(row.num_elements * len(row.layers) for row in rows) == found.get_nb_trainable_parameters()[0]
    if name in FAMILIES:  # PEFT's own choice; of experts it has the router too
        from peft import LoraConfig, get_peft_model

        hf = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
        theirs = get_peft_model(hf, LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM"))
        assert get_peft_model_state_dict(theirs).keys() == expected.keys()


@pytest.mark.parametrize("name", CASES)
def test_merge_is_pefts_to_the_bit_and_has_the_files_of_the_base(
    root: Path, tmp_path: Path, name: str
) -> None:
    adapter = adapter_of(root / f"{name} adapter", model_of(root / name))
    assert adapter.scale == CASES[name].scale
    merge_adapter(root / name, root / f"{name} adapter", tmp_path / "out")
    expected = load_file(root / f"{name} merged.safetensors")
    assert not _equal(expected, _tensors(root / name)) and _equal(_tensors(tmp_path / "out"), expected)
    assert (tmp_path / "out" / "config.json").read_bytes() == (root / name / "config.json").read_bytes()


def test_the_command_merges_and_says_what_it_does_not_replace(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = {"base": root / "bloom", "adapter": root / "bloom adapter", "save": tmp_path / "out"}
    line = [f"--{flag}={folder}" for flag, folder in folders.items()]
    assert main(line) == 0
    assert main(line) == 4 and "holds a Hugging Face model already" in capsys.readouterr().err
    assert main([*line, "--overwrite"]) == 0
    assert _equal(_tensors(tmp_path / "out"), load_file(root / "bloom merged.safetensors"))


def test_merge_rounds_once_and_keeps_the_layout(tmp_path: Path) -> None:
    family_model("llama-3", tmp_path / "hf", dtype=torch.bfloat16, max_shard_size="60KB")
    base = _tensors(tmp_path / "hf")
    save_file(base, tmp_path / "hf" / "whole.safetensors")  # for the oracle
    whole = shutil.copytree(tmp_path / "hf", tmp_path / "one")
    (whole / "whole.safetensors").rename(whole / "model.safetensors")
    (tmp_path / "hf" / "whole.safetensors").unlink()
    model, adapter = model_of(tmp_path / "hf"), AdapterConfig(lora_rank=4, lora_alpha=6)
    found = peft_model(whole, model, adapter)
    found.save_pretrained(tmp_path / "adapter")
    merge_adapter(tmp_path / "hf", tmp_path / "adapter", tmp_path / "out")
    exact = found.float().merge_and_unload()
    assert _equal(_tensors(tmp_path / "out"), {k: v.bfloat16() for k, v in exact.named_parameters()})
    index = "model.safetensors.index.json"
    assert (tmp_path / "out" / index).read_bytes() == (tmp_path / "hf" / index).read_bytes()
    (whole / "model.safetensors").rename(whole / "model-00001-of-00001.safetensors")
    (whole / index).write_text(
        json.dumps({"weight_map": dict.fromkeys(base, "model-00001-of-00001.safetensors")})
    )
    merge_adapter(whole, tmp_path / "adapter", tmp_path / "numbered")
    assert (tmp_path / "numbered" / index).is_file(), "transformers finds a file of this name by it alone"


LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "TP and PP": ("llama-2-70B", {"tp": 2, "pp": 2}),
    "TP and DP": ("bloom", {"tp": 2, "dp": 2}),
    "EP over DP, PP": ("qwen-2-moe-mixed", {"pp": 2, "dp": 2, "expert_model_parallel_size": 2}),
    "EP and ETP": (
        "qwen-3-moe", {"tp": 2, "dp": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
    ),
    "EP over TP and DP": (
        "mixtral", {"tp": 2, "dp": 2, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}
    ),
    "latent attention": (
        "deepseek-v2-lite",
        {"tp": 2, "dp": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    ),
}  # fmt: skip


PARTLY_LOADED = ("EP over DP, PP", "latent attention")
"""PEFT 0.21 on transformers 5 takes shared experts and MLPs for what it has renamed."""


def _live(rank: int, world_size: int, root: Path, tokenizer: Any) -> list[str]:
    """The base and PEFT's adapter in, both out; messages of imports and exports that fail."""
    for layout, (name, changes) in LAYOUTS.items():
        adapter, is_cut = CASES[name], changes.get("tp", 1) > 1
        config = family_run(root / name, **changes, **asdict(adapter), sequence_parallel=is_cut)
        model, (groups, stages) = config.model, build_stages(config)
        import_hf(stages, root / name, model, groups)
        import_adapter(stages, root / f"{name} adapter", model, adapter, groups)
        target = root / f"{layout} adapter"
        said = messages_from("WARNING", "patch.convert")
        snapshot = f"/cache/models--org--base/snapshots/{'1' * 40}"
        export_adapter(stages, target, model, adapter, groups, base=snapshot)
        assert bool(said) == (layout in PARTLY_LOADED and rank == 0)
        how = {"hf_source": root / name, "tokenizer": tokenizer, "adapter": adapter}
        export_hf(stages, root / f"{layout} merged", model, groups, **how)
        assert not any("lora" in each for each, _ in iter_hf_weights(stages, model, groups))
        if layout != "latent attention":
            new_job()
    messages = []
    with pytest.raises(ConversionError) as broken:
        source = f"{name} adapter" if rank else "nowhere"
        import_adapter(stages, root / source, model, adapter, groups)
    with pytest.raises(ConversionError) as other:
        export_adapter(stages, root / name, model, adapter, groups, base=None)
    for each in (broken, other):
        messages.append(str(each.value))
    with torch.no_grad():
        for each, parameter in stages[0].named_parameters():
            if "lora_B" in each:
                parameter.fill_(float("nan"))
    with pytest.raises(ConversionError) as infinite:
        export_hf(stages, root / "infinite", model, groups, **how)
    return [*messages, str(infinite.value)]


@pytest.fixture(scope="module")
def ranks(root: Path, tiny_tokenizer: Any) -> list[list[str]]:
    return run_distributed(_live, 4, root, tiny_tokenizer())


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_live_adapters_are_the_folders_at_every_layout(root: Path, ranks: Any, layout: str) -> None:
    name, adapter = LAYOUTS[layout][0], CASES[LAYOUTS[layout][0]]
    theirs = load_file(root / f"{name} adapter" / WEIGHTS)
    assert _equal(load_file(root / f"{layout} adapter" / WEIGHTS), theirs)
    assert _equal(_tensors(root / f"{layout} merged"), load_file(root / f"{name} merged.safetensors"))
    written = json.loads((root / f"{layout} adapter" / CONFIG).read_text())
    saved = json.loads((root / f"{name} adapter" / CONFIG).read_text())
    assert written["base_model_name_or_path"] == "org/base"
    assert {key: saved[key] for key in ("r", "lora_alpha", "use_rslora")}.items() <= written.items()
    model = model_of(root / name)
    assert adapters_of(model, adapter_of(root / f"{layout} adapter", model)) == adapters_of(model, adapter)


@pytest.mark.parametrize("layout", ["TP and PP", "EP over TP and DP"])
@pytest.mark.long
def test_written_adapter_gives_pefts_model_the_logits_of_the_merge(
    root: Path, ranks: Any, layout: str
) -> None:
    name, ids = LAYOUTS[layout][0], torch.arange(2, 34).view(2, 16)
    base = AutoModelForCausalLM.from_pretrained(root / name)
    without = base(ids).logits
    found = PeftModel.from_pretrained(base, root / f"{layout} adapter")(ids).logits
    merged = AutoModelForCausalLM.from_pretrained(root / f"{layout} merged")(ids).logits
    assert (found - merged).abs().max() < 1e-5 < 1e-2 < (found - without).abs().max()


@pytest.mark.long
def test_failures_are_of_every_rank(root: Path, ranks: Any) -> None:
    first, *others = ranks
    assert "nowhere" in first[0] and "deepseek-v2-lite exists and is no PEFT adapter" in first[1]
    assert "model.layers" in first[2] and "not finite in float32" in first[2]
    assert all(message in other for found in others for message, other in zip(first, found, strict=True))
    assert not (root / "infinite").exists()


def _described(**keys: Any) -> Callable[[Path], object]:
    """What changes keys of adapter_config.json."""

    def change(folder: Path) -> object:
        described = json.loads((folder / CONFIG).read_text()) | keys
        return (folder / CONFIG).write_text(json.dumps(described))

    return change


def _stored(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """What changes the tensors."""

    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return rewrite


class _Bomb:
    def __reduce__(self) -> Any:
        return pytest.exit, ("it was unpickled",)


def _pickled(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    torch.save({"a": _Bomb()}, folder / "adapter_model.bin")


def _header(length: int) -> Callable[[Path], object]:
    return lambda folder: (folder / WEIGHTS).write_bytes(length.to_bytes(8, "little") + b"{" * 100)


def _linked(name: str, target: str) -> Callable[[Path], None]:
    def link(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return link


Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "rank": (_described(r=10**9), "r: got 1000000000, expected at most 8192"),
    "no rank": (_described(r=0), "r: got 0, expected at least 1"),
    "nan": (_described(lora_alpha=float("nan")), "lora_alpha: got nan, expected a finite number"),
    "negative": (_described(lora_alpha=-1), "lora_alpha: got -1.*more than 0"),
    "dropout": (_described(lora_dropout=1), "lora_dropout: got 1"),
    "dora": (_described(use_dora=True), "use_dora: got True.*such adapters are not supported"),
    "bias": (_described(bias="all"), "bias: got 'all'"),
    "whole modules": (_described(modules_to_save=["lm_head"]), "modules_to_save"),
    "ranks": (_described(rank_pattern={"q_proj": 8}), "rank_pattern.*expected 4 for all"),
    "other base": (_described(init_lora_weights="pissa"), "init_lora_weights: got 'pissa'"),
    "kind": (_described(peft_type="IA3"), "peft_type: got 'IA3', expected 'LORA'"),
    "task": (_described(task_type="SEQ_CLS"), "task_type"),
    "pattern": (_described(target_modules="(a+)+" * 1000), "target_modules.*patterns are not supported"),
    "router": (_described(target_modules=["gate", "q_proj"]), "target_modules: got 'gate', expected some of"),
    "fewer": (_described(target_modules=["q_proj"]), r"no place for \(24 such tensors\).*adapter of"),
    "no JSON": (lambda f: (f / CONFIG).write_text("[" * 10**5), "malformed JSON"),
    "no config": (lambda f: (f / CONFIG).unlink(), "cannot be read"),
    "endless config": (_linked(CONFIG, "/dev/zero"), "cannot be read"),
    "endless weights": (_linked(WEIGHTS, "/dev/zero"), f"expected {WEIGHTS}"),
    "pickled": (_pickled, f"has adapter_model.bin of an adapter's weights, expected {WEIGHTS}"),
    "header": (_header(2**62), "cannot be read as safetensors"),
    "shape": (
        _stored(lambda t: t.update({Q_A: t[Q_A][:, :3].clone()})), r"q_proj.*shape \(4, 3\).*\(4, 64\)"
    ),
    "missing": (_stored(lambda t: t.pop(Q_A)), f"has no tensor {Q_A}"),
    "a path": (_stored(lambda t: t.update({"../../x": t[Q_A].clone()})), r"holds ../../x .*no place for"),
    "integers": (_stored(lambda t: t.update({Q_A: t[Q_A].int()})), "stored as I32"),
    "not finite": (_stored(lambda t: t[Q_A].fill_(float("inf"))), f"{Q_A} in .*NaN or infinite"),
}  # fmt: skip


@pytest.mark.parametrize("hostile", HOSTILE)
def test_hostile_folder_is_refused_at_once_and_leaves_nothing(
    root: Path, tmp_path: Path, hostile: str
) -> None:
    spoil, message = HOSTILE[hostile]
    adapter = shutil.copytree(root / "llama-2-70B adapter", tmp_path / "adapter")
    spoil(adapter)
    begin = time.perf_counter()
    with pytest.raises(ConversionError, match=message) as error:
        merge_adapter(root / "llama-2-70B", adapter, tmp_path / "out")
    assert error.value.field in (None, "lora_load")
    assert time.perf_counter() - begin < SECONDS and [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_target_that_matches_nothing_names_what_there_is_and_no_pattern_explodes(root: Path) -> None:
    model, begin = model_of(root / "deepseek-v2"), time.perf_counter()
    words = "expected all-linear, some of down_proj, gate_proj, kv_a_proj_with_mqa, .*such as model.layers.*"
    for target in ("lm_head", "mlp.gate", "", "embed_tokens", "*a" * 10_000 + "b", "(a+)+$"):
        with pytest.raises(ConfigError, match=words):
            targets_are_there(model, AdapterConfig(lora_rank=4, lora_target_modules=f"o_proj,{target}"))
    with pytest.raises(ConfigError, match=r"'o_porj'.*did you mean o_proj\?"):
        targets_are_there(model, AdapterConfig(lora_rank=4, lora_target_modules="o_porj"))
    assert time.perf_counter() - begin < SECONDS
