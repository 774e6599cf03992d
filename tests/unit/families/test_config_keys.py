"""config_keys.yaml against transformers: the keys of its classes, and what a second value does to logits."""

import inspect
import json
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from distributed_runner import new_job, run_distributed
from hf_families import WITHOUT_CLASS, family_model, family_run
from packed_runs import build_untrained
from refusals import refused
from transformers import AutoModelForCausalLM, cache_utils, masking_utils, modeling_rope_utils, modeling_utils
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from patch.convert.hf_config_files import model_description
from patch.errors import ConfigError
from patch.families import FAMILIES
from patch.families.config_json import key_table
from patch.preflight.model_of_folder import read_hf_config

NAMES = {
    "llama": "llama-3", "mistral": "mistral-0.1", "qwen2": "qwen-2", "qwen3": "qwen-3", "bloom": "bloom",
    "mixtral": "mixtral", "qwen2_moe": "qwen-2-moe", "qwen3_moe": "qwen-3-moe",
    "deepseek_v2": "deepseek-v2-lite", "deepseek_v3": "moonlight", "glm4_moe": "glm-4.5",
    "smollm3": "smollm3", "granite": "granite", "phi3": "phi-4-mini",
    "ministral3": "ministral-3", "olmo2": "olmo-2", "olmo3": "olmo-3", "glm4": "glm-4", "gemma2": "gemma-2",
    "gemma3_text": "gemma-3",
}  # fmt: skip
OF_WEIGHTS = {"model_type", "dtype", "torch_dtype", "quantization_config"}
"""Keys that name the family, or the numbers in which weights are stored."""
VALUES = yaml.safe_load(Path(__file__).with_name("config_values.yaml").read_text())
SHARED = (cache_utils, masking_utils, modeling_rope_utils, modeling_utils)
"""Code of all families that asks a configuration for keys that its class may not have."""
TOKENIZER = SimpleNamespace(bos_token_id=1, eos_token_id=2, pad_token_id=None)
TOKENS = (torch.arange(32) * 7 % 170)[None]


def changes_of(model_type: str, key: str) -> dict[str, Any]:
    value = VALUES.get(model_type, {}).get(key, VALUES["all"].get(key))
    return value if isinstance(value, dict) and key in value else {key: value}


def used(model_type: str) -> dict[str, dict[str, Any]]:
    """Keys that are read, in whatever spelling, and what a file has for a second value."""
    rows = key_table()[model_type].items()
    keys = {key for key, row in rows if row == "used" or "means" in row or "default" in row}
    return {key: changes_of(model_type, key) for key in sorted(keys - OF_WEIGHTS)}


def logits_of(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(TOKENS, return_dict=True).logits[0]


def our_logits(rank: int, world_size: int, folders: list[Path]) -> list[np.ndarray]:
    found = []
    for folder in folders:
        config = family_run(folder)
        run = build_untrained(config, folder)
        with torch.no_grad():
            found.append(run.stages[0](TOKENS, None, None)[0, :, : config.model.vocab_size].numpy())
        new_job()
    return found


def change(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("model_type", [each for each in FAMILIES if each not in WITHOUT_CLASS])
def test_table_has_every_key_that_transformers_asks_for(model_type):
    known, of_class = key_table()[model_type], CONFIG_MAPPING[model_type]
    code = inspect.getsource(inspect.getmodule(AutoModelForCausalLM._model_mapping[of_class]))
    asked = set(re.findall(r"\bconfig\.([a-z]\w*)", code))
    for source in (code, *map(inspect.getsource, SHARED)):
        asked |= set(re.findall(r'getattr\((?:self\.)?config, "([a-z]\w*)"', source))
    asked = {name for name in asked if not callable(getattr(of_class, name, None))}
    keys = {field.name for field in fields(of_class)} | of_class.attribute_map.keys() | asked
    assert keys - known.keys() == set()
    for field in fields(of_class):
        row = known[field.name]
        assert "only" not in row or field.default in row["only"], "an absent key would have to be refused"
        assert "default" not in row or field.default == row["default"]


@pytest.mark.parametrize("model_type", [each for each in FAMILIES if each not in WITHOUT_CLASS])
def test_keys_called_irrelevant_change_nothing_and_others_are_refused(tmp_path, model_type):
    family_model(NAMES[model_type], tmp_path)
    before, fields_before = logits_of(tmp_path), read_hf_config(tmp_path)
    rows = key_table()[model_type].items()
    text = (tmp_path / "config.json").read_text()
    for key in (key for key, row in rows if "only" in row):
        change(tmp_path, **changes_of(model_type, key))
        with refused(ConfigError, f"config.json: {key}: got"):
            read_hf_config(tmp_path)
        (tmp_path / "config.json").write_text(text)
    inert = [key for key, row in rows if "irrelevant" in row]
    change(tmp_path, unknown=1, **{key: changes_of(model_type, key)[key] for key in inert})
    assert read_hf_config(tmp_path) == fields_before
    assert torch.allclose(logits_of(tmp_path), before, rtol=0, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("model_type", [each for each in FAMILIES if each not in WITHOUT_CLASS])
def test_keys_called_used_give_the_logits_of_transformers_and_are_written(tmp_path, model_type):
    folders = {key: tmp_path / key for key in used(model_type)}
    for key, changes in used(model_type).items():
        family_model(NAMES[model_type], folders[key], spelling=5, **changes)
    (ours,) = run_distributed(our_logits, 1, [*folders.values()])
    for (key, folder), logits in zip(folders.items(), ours, strict=True):
        theirs = logits_of(folder)
        assert torch.allclose(torch.from_numpy(logits), theirs, rtol=0, atol=1e-4), key
        described = model_description(family_run(folder).model, None, TOKENIZER, torch.float32)
        (folder / "config.json").write_text(json.dumps(described))
        assert torch.equal(logits_of(folder), theirs), f"{key}, written anew"
