"""RoPE frequencies and angles against transformers', to the bit."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import small_run
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from patch.config.schema import ModelConfig
from patch.distributed.context_group import Zigzag
from patch.model.attention.rotary import RotaryTable, attention_factor, inverse_frequencies
from patch.preflight.model_of_folder import read_hf_config

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default"},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 64},
    "llama3, other factors": LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 8.0},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": YARN,
    "yarn, no factor": YARN | {"factor": None},
    "yarn, original length by default": {"rope_type": "yarn", "factor": 2.0},
    "yarn, betas": YARN | {"beta_fast": 8.0, "beta_slow": 2.0},
    "yarn, border between channels": YARN | {"truncate": False},
    "yarn, one border": YARN | {"beta_fast": 1.5, "beta_slow": 1.4},
    "yarn, no extension": YARN | {"factor": 1.0},
    "yarn, attention factor": YARN | {"attention_factor": 0.83},
    "yarn, mscale": YARN | {"mscale": 0.707, "mscale_all_dim": 1.1},
    "yarn, one mscale": YARN | {"mscale": 0.707},
}


def read_model(
    folder: Path, rope: dict[str, Any], beside: dict[str, Any] | None = None, **changes: Any
) -> tuple[LlamaConfig, ModelConfig]:
    """What transformers and what we read from one config.json; `beside` are more of its keys."""
    described = {
        "model_type": "llama", "hidden_size": 128, "num_attention_heads": 4, "num_hidden_layers": 1,
        "intermediate_size": 32, "vocab_size": 100, "max_position_embeddings": 512, "head_dim": 32,
        "rope_parameters": {"rope_theta": 10000.0, **rope}, **(beside or {}),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(described))
    model = small_run(**read_hf_config(folder)).model
    return LlamaConfig.from_pretrained(folder), dataclasses.replace(model, **changes)


@pytest.mark.parametrize("rope", SCALINGS.values(), ids=SCALINGS)
def test_scaled_frequencies_and_attention_factor_equal_transformers(tmp_path: Path, rope: dict) -> None:
    config, model = read_model(tmp_path, rope)
    expected = LlamaRotaryEmbedding(config)
    assert torch.equal(inverse_frequencies(model), expected.inv_freq)
    assert attention_factor(model) == expected.attention_scaling


@pytest.mark.parametrize("rope", [YARN, LLAMA3 | {"original_max_position_embeddings": 64}, LLAMA3])
def test_an_original_length_beside_the_scaling_counts(tmp_path: Path, rope: dict) -> None:
    """As some files have it; transformers takes it when it computes frequencies."""
    config, model = read_model(tmp_path, rope, {"original_max_position_embeddings": 48})
    assert torch.equal(inverse_frequencies(model), LlamaRotaryEmbedding(config).inv_freq)
    assert model.rope_original_max_position == 48


@pytest.mark.parametrize("length", [100, 512, 513, 1500, 2048])
def test_dynamic_frequencies_are_those_of_a_row_of_the_runs_length(tmp_path: Path, length: int) -> None:
    config, model = read_model(tmp_path, SCALINGS["dynamic"], seq_length=length)
    expected = LlamaRotaryEmbedding(config)
    expected(torch.ones(1), torch.arange(length)[None])
    assert torch.equal(inverse_frequencies(model), expected.inv_freq)
    assert torch.equal(expected.inv_freq, expected.original_inv_freq) == (length <= 512)


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (2, 4)])
def test_a_rank_has_the_table_of_its_own_tokens_alone(tmp_path: Path, rank: int, size: int) -> None:
    described, model = read_model(tmp_path, SCALINGS["yarn, attention factor"], seq_length=4096)
    zigzag, length = Zigzag(rank, size), 4096
    table = RotaryTable(inverse_frequencies(model), attention_factor(model), zigzag)(length)
    assert table.shape == (2, length // size, 1, 1, model.kv_channels // 2)
    assert table.untyped_storage().nbytes() == table.numel() * 4
    own = zigzag.cut(torch.arange(length), 0)[None]
    expected = LlamaRotaryEmbedding(described)(torch.ones(1), own)
    for found, right in zip(table[:, :, 0, 0], expected, strict=True):
        assert torch.equal(torch.cat((found, found), dim=-1), right[0])
