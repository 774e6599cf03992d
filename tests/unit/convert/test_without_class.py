"""Families without a class in transformers: read without their folders' code. The oracle is plain torch."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from distributed_runner import new_job, run_distributed
from hf_families import family_run
from packed_runs import build_untrained
from safetensors.torch import load_file
from training_runs import hf_gradients, seeded_batches
from without_class import MODELS, SHAPE, shapes, write_model

from patch.convert import hf_to_mcore, mcore_to_hf
from patch.convert.hf_config_files import model_description
from patch.preflight.model_of_folder import read_hf_config
from patch.training.step import run_schedule


def rotated(heads: torch.Tensor, base: float) -> torch.Tensor:
    """[B, heads, S, D]."""
    size = heads.shape[-1]
    angles = torch.arange(heads.shape[2])[:, None] / base ** (torch.arange(0, size, 2) / size)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


def logits_of(weights: dict[str, torch.Tensor], config: dict[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    """Logits [B, S, V] as the published code of these models computes them."""
    names, hidden, count = [*shapes(config)], config["hidden_size"], config["num_attention_heads"]
    size, groups = hidden // count, config.get("num_key_value_heads", count)
    stream = F.embedding(tokens, weights[names[0]])
    # Scores grow with the key's position; slopes of a number of heads that is no power of 2.
    slopes = [2 ** -(8 / 4 * n) for n in range(1, 5)] + [2 ** -(8 / 8 * n) for n in (1, 3)]
    places = torch.arange(tokens.shape[1], dtype=torch.float32)
    future = torch.full((len(places), len(places)), -math.inf).triu(1)
    for layer in range(config["num_hidden_layers"]):
        of_layer = names[1 + 7 * layer : 8 + 7 * layer]
        qkv, out, gate, up, down, before, behind = (weights[name] for name in of_layer)
        mixed = F.linear(F.rms_norm(stream, (hidden,), before, 1e-6), qkv)
        if config["model_type"] == "internlm2":  # queries, key and value of one group after the other
            mixed = mixed.unflatten(-1, (groups, -1, size))
            query, key, value = mixed[..., :-2, :].flatten(2, 3), mixed[..., -2, :], mixed[..., -1, :]
        else:
            query, key, value = (part.unflatten(-1, (-1, size)) for part in mixed.chunk(3, dim=-1))
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        mask = future
        if "model_max_length" in config:
            mask = future + torch.tensor(slopes)[:, None, None] * places
        else:
            query, key = (rotated(part, config.get("rope_theta", 1e4)) for part in (query, key))
        key, value = (part.repeat_interleave(count // groups, dim=1) for part in (key, value))
        found = torch.softmax(query @ key.transpose(2, 3) / size**0.5 + mask, dim=-1) @ value
        stream = stream + F.linear(found.transpose(1, 2).flatten(2), out)
        given = F.rms_norm(stream, (hidden,), behind, 1e-6)
        stream = stream + F.linear(F.silu(F.linear(given, gate)) * F.linear(given, up), down)
    table = weights[names[-1]]
    if config["vocab_size"] == 125696:  # Baichuan 2 normalizes each row
        table = table / table.square().sum(dim=1, keepdim=True).sqrt()
    return F.linear(F.rms_norm(stream, (hidden,), weights[names[-2]], 1e-6), table)


LONG = {"seq_length": 72, "max_padding_length": 72}
"""Two samples have more tokens than one chunk of Baichuan 2's loss."""


def steps_of(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    found = {}
    for name in MODELS:
        run = build_untrained(family_run(root / name, **LONG), root / name)
        batches = seeded_batches(run.config, 0)
        with torch.no_grad():
            logits = run.stages[0](batches[0].tokens, None, None)[..., : run.config.model.vocab_size].numpy()
        learned = float(sum(batch.loss_mask.sum() for batch in batches))
        run_schedule(run, batches, learned, loss_scale=1.0)
        gradients = hf_gradients(run.stages, run.config)
        found[name] = logits, {key: each.numpy() for key, each in gradients.items()}
        new_job()
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("without class")
    for name in MODELS:
        write_model(name, root / name)
    return root


@pytest.fixture(scope="module")
def ours(root: Path) -> dict[str, tuple[np.ndarray, dict[str, np.ndarray]]]:
    return run_distributed(steps_of, 1, root)[0]


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_plain_torch(root: Path, ours: dict, name: str) -> None:
    weights = load_file(root / name / "model.safetensors")
    weights = {key: weight.requires_grad_() for key, weight in weights.items()}
    config, (logits, gradients) = SHAPE | MODELS[name], ours[name]
    batches = seeded_batches(family_run(root / name, **LONG), 0)
    expected = logits_of(weights, config, batches[0].tokens)
    assert torch.allclose(torch.from_numpy(logits), expected, rtol=0, atol=1e-4)
    total, learned = torch.zeros(()), sum(batch.loss_mask.sum() for batch in batches)
    for batch in batches:
        each = logits_of(weights, config, batch.tokens).flatten(0, 1)
        losses = F.cross_entropy(each, batch.labels.flatten(), reduction="none")
        total = total + (losses * batch.loss_mask.flatten()).sum() / learned
    total.backward()
    assert gradients.keys() == weights.keys()
    for key, weight in weights.items():
        actual = torch.from_numpy(gradients[key])
        assert (actual - weight.grad).abs().max() < 2e-5 * weight.grad.abs().max() + 1e-7, key


@pytest.mark.parametrize("name", MODELS)
def test_folder_comes_back_byte_for_byte_and_its_config_is_written_anew(
    root: Path, tmp_path: Path, name: str, tiny_tokenizer: Any
) -> None:
    hf_to_mcore(root / name, tmp_path / "mcore")
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / file).read_bytes() == (root / name / file).read_bytes()
    model = family_run(root / name).model
    described = model_description(model, None, tiny_tokenizer(), torch.float32)
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert read_hf_config(tmp_path) == read_hf_config(root / name)
