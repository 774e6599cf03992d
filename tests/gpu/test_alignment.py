"""Logits on a GPU against transformers: within the bounds in every form, nearer in Hugging Face's order."""

from pathlib import Path

import pytest
from hf_families import family_model

from patch.alignment import verify
from patch.convert import hf_to_mcore
from patch.device import DeviceContext

FAMILIES = ["llama-3.1", "mistral-0.1", "qwen-3", "bloom", "mixtral", "qwen-2-moe", "deepseek-v2"]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
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
