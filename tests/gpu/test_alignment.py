"""Logits on a GPU against transformers: within the bounds in every form, nearer in Hugging Face's order."""

import json
from pathlib import Path
from typing import Any

import pytest
from hf_families import family_model

from patch.alignment import verify
from patch.convert import hf_to_mcore
from patch.device import DeviceContext

ROPE: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["llama-3.1", "mistral-0.1", "qwen-3"])
def test_logits_are_those_of_transformers(
    job: DeviceContext, tmp_path: Path, family: str, precision: str, attention: str
) -> None:
    family_model(family, tmp_path / "hf")
    hf_to_mcore(tmp_path / "hf", tmp_path / "mcore")
    found, verdict = verify(tmp_path / "hf", tmp_path / "mcore", precision=precision, attention=attention)
    print(verdict.text)
    assert found.device == job.device.type and verdict.is_normal, verdict.text
    if precision == "bf16":  # of fp32 both are noise
        assert found.logits.aligned.mean <= found.logits.fast.mean


@pytest.mark.parametrize("scaling", ROPE)
def test_logits_with_scaled_rope_are_those_of_transformers(
    job: DeviceContext, tmp_path: Path, scaling: str
) -> None:
    family_model("llama-3.1", tmp_path / "hf")
    file = tmp_path / "hf" / "config.json"
    described = json.loads(file.read_text())
    base = (described.get("rope_parameters") or described.pop("rope_scaling", None) or {}).get("rope_theta")
    described["rope_parameters"] = {"rope_theta": base or described["rope_theta"], **ROPE[scaling]}
    file.write_text(json.dumps(described))
    hf_to_mcore(tmp_path / "hf", tmp_path / "mcore")
    found, verdict = verify(tmp_path / "hf", tmp_path / "mcore", precision="fp32", attention="sdpa")
    assert found.device == job.device.type and verdict.is_normal, verdict.text
