"""The first operation that differs; the oracle is the weight of transformers' model that was changed."""

from pathlib import Path

import pytest
import torch
from distributed_runner import new_job, run_distributed
from hf_families import FAMILIES, family_model, family_run
from packed_runs import build_untrained

CHANGED = {
    "model.embed_tokens": (None, "embed_tokens"),
    "model.layers.0.self_attn.k_proj": (0, "k_proj"),
    "model.layers.0.self_attn.q_norm": (0, "q_norm"),
    "model.layers.1.self_attn.o_proj": (1, "o_proj"),
    "model.layers.1.post_attention_layernorm": (1, "post_attention_layernorm"),
    "model.layers.1.mlp.up_proj": (1, "up_proj"),
    "model.layers.1.mlp.down_proj": (1, "down_proj"),
    "model.norm": (None, "norm"),
}
"""Module of transformers whose weight is changed -> layer and operation that must be named."""


@torch.no_grad()
def _trace(rank: int, world_size: int, folder: Path) -> dict[str, tuple | None]:
    from transformers import AutoModelForCausalLM

    from patch.alignment.trace import first_difference

    run = build_untrained(family_run(folder, precision="fp32", precision_align="sdpa"), folder)
    (ours,), model = run.stages, run.config.model
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    prompt = torch.arange(3, 12)[None]
    found: dict[str, tuple | None] = {"nothing": first_difference(ours.eval(), theirs, prompt, model)}
    for name in CHANGED:
        weight = theirs.get_submodule(name).weight
        before = weight.clone()
        weight += 0.5
        found[name] = first_difference(ours, theirs, prompt, model)
        weight.copy_(before)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple | None]:
    folder = tmp_path_factory.mktemp("trace")
    family_model("qwen-3", folder, tie_word_embeddings=False)
    return run_distributed(_trace, 1, folder)[0]


def test_equal_models_have_no_first_difference(found: dict[str, tuple | None]) -> None:
    assert found["nothing"] is None


@pytest.mark.parametrize("name", CHANGED)
def test_changed_operation_is_named(found: dict[str, tuple | None], name: str) -> None:
    layer, operation, largest = found[name] or (None, None, 0)
    assert (layer, operation) == CHANGED[name] and largest > 0


@torch.no_grad()
def _trace_plain(rank: int, world_size: int, folder: Path) -> tuple | None:
    from transformers import AutoModelForCausalLM

    from patch.alignment.trace import first_difference

    run = build_untrained(family_run(folder, precision="fp32"), folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    return first_difference(run.stages[0].eval(), theirs, torch.arange(3, 12)[None], run.config.model)


def test_bias_that_a_layer_leaves_to_the_next_operation_is_part_of_its_result(tmp_path: Path) -> None:
    """Without values attention is 0 to the bit in both, so the projection gives its bias alone."""
    model = family_model("bloom")
    for layer in model.transformer.h:
        for parameter in layer.self_attention.query_key_value.parameters():
            parameter.data.zero_()
    model.save_pretrained(tmp_path)
    layer, operation, largest = run_distributed(_trace_plain, 1, tmp_path)[0] or (0, "none", 0.0)
    assert operation not in ("attention", "dense") and largest < 1e-5, (layer, operation, largest)


@torch.no_grad()
def _trace_each(rank: int, world_size: int, folders: list[Path]) -> dict[str, tuple | None]:
    from transformers import AutoModelForCausalLM

    from patch.alignment.trace import first_difference

    found = {}
    for folder in folders:
        run = build_untrained(family_run(folder, precision="fp32"), folder)
        theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        prompt = torch.arange(3, 12)[None]
        found[folder.name] = first_difference(run.stages[0].eval(), theirs, prompt, run.config.model)
        new_job()
    return found


def test_operations_of_each_family_are_compared(tmp_path: Path) -> None:
    """Gemma's embedding has a factor, its norms of heads see the heads first; OLMo's see all heads."""
    folders = [tmp_path / name for name in FAMILIES]
    for folder in folders:
        family_model(folder.name, folder)
    for name, first in run_distributed(_trace_each, 1, folders)[0].items():
        _, operation, largest = first or (None, "none", 0.0)
        assert operation != "embed_tokens" and largest < 1e-5, (name, first)
