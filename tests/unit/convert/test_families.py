"""Every family from its config.json alone: logits and the way back, in one process."""

from pathlib import Path

import pytest
import torch
from distributed_runner import run_distributed
from hf_families import FAMILIES, family_model, family_run
from safetensors.torch import load_file

LENGTHS = (1, 5, 16, 17, 100)
"""Around a window of 16, and across several of them."""


def _prompt(length: int) -> torch.Tensor:
    return torch.randint(0, 250, (2, length), generator=torch.Generator().manual_seed(length))


@torch.no_grad()
def _convert(rank: int, world_size: int, root: Path, tokenizer) -> tuple[dict, dict]:
    """Into our model and back out, for every family: its logits by prompt length; and fused norms."""
    from patch import compat
    from patch.convert import export_hf, import_hf
    from patch.device import DeviceContext
    from patch.distributed.groups import initialize
    from patch.model import build_llama_model

    compat.apply(cuda=False)
    groups, logits = None, {}
    for name in FAMILIES:
        config = family_run(root / name)
        groups = groups or initialize(config, DeviceContext(torch.device("cpu"), "gloo"))
        (model,) = build_llama_model(config.model, groups, torch.device("cpu"), config.execution)
        model.eval()
        import_hf([model], root / name, config.model, groups)
        out = root / f"{name}-back"
        export_hf([model], out, config.model, groups, hf_source=root / name, tokenizer=tokenizer)
        logits[name] = {length: model(_prompt(length), None, None)[..., :250].numpy() for length in LENGTHS}
    return logits, _import_with_fused_norms(root / "llama-3", groups)


def _import_with_fused_norms(folder: Path, groups) -> dict[str, object]:
    """The norms of a model whose parameters are named as Transformer Engine's layers name them."""
    from patch.convert import import_hf
    from patch.model import build_llama_model

    config = family_run(folder)
    (model,) = build_llama_model(config.model, groups, torch.device("cpu"), config.execution)
    for layer in model.decoder.layers:
        for norm, linear in (
            ("input_layernorm", "self_attention.linear_qkv"),
            ("pre_mlp_layernorm", "mlp.linear_fc1"),
        ):
            weight = layer.get_submodule(norm).weight
            layer.get_submodule(linear).register_parameter("layer_norm_weight", weight)
            delattr(layer, norm)
    import_hf([model], folder, config.model, groups)
    return {name: weight.detach().numpy() for name, weight in model.named_parameters() if "norm" in name}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("families")
    for name in FAMILIES:
        family_model(name, root / name)
    return root


@pytest.fixture(scope="module")
def converted(root, tiny_tokenizer) -> tuple[dict, dict]:
    return run_distributed(_convert, 1, root, tiny_tokenizer())[0]


@pytest.fixture(scope="module")
def logits(converted) -> dict:
    return converted[0]


def test_norms_are_found_under_transformer_engines_names(root, converted):
    stored = load_file(root / "llama-3" / "model.safetensors")
    for name, weight in converted[1].items():
        layer = name.split(".")[2]
        theirs = {
            f"decoder.layers.{layer}.self_attention.linear_qkv.layer_norm_weight": "input_layernorm",
            f"decoder.layers.{layer}.mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm",
        }
        if name in theirs:
            assert torch.equal(
                torch.from_numpy(weight), stored[f"model.layers.{layer}.{theirs[name]}.weight"]
            )
    assert len(converted[1]) == 5


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_logits_are_those_of_transformers(root, logits, name):
    model = family_model(name)
    for length in LENGTHS:
        expected = model(_prompt(length)).logits
        torch.testing.assert_close(torch.from_numpy(logits[name][length]), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_way_back_is_bit_equal(root, logits, name):
    source, target = root / name, root / f"{name}-back"
    before, after = (load_file(folder / "model.safetensors") for folder in (source, target))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())
    assert (target / "config.json").read_bytes() == (source / "config.json").read_bytes()
