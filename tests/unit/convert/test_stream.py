"""Hugging Face folder -> torch_dist checkpoint -> Hugging Face folder: every family, bit for bit.

The oracles are transformers, and of the checkpoint upstream's plain GPTModel after upstream's strict load.
"""

import itertools
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_runner import new_job, run_distributed
from hf_families import FAMILIES, MIXTURES, family_model, family_run
from megatron.core import dist_checkpointing
from safetensors.torch import load_file, save_file
from training_runs import build_stages
from transformers import AutoModelForCausalLM
from upstream_models import upstream_stage

from patch.compat.cpu import replace_torch
from patch.convert import ConversionError, hf_to_mcore, import_hf, mcore_to_hf, offline
from patch.families import traits_of

SHARDED = ("qwen-2", *MIXTURES)
"""In several files."""


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Each family as NAME, converted as NAME-mcore and back as NAME-back; pieces of a few rows."""
    root = tmp_path_factory.mktemp("stream")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offline, "WINDOW_BYTES", 5000)
        for name in (*FAMILIES, *MIXTURES):
            family_model(name, root / name, **({"max_shard_size": "60KB"} if name in SHARDED else {}))
            (root / name / "tokenizer.json").write_text('{"a": 1}')
            hf_to_mcore(root / name, root / f"{name}-mcore")
            mcore_to_hf(root / f"{name}-mcore", root / f"{name}-back")
    return root


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.long
@pytest.mark.parametrize("name", [*FAMILIES, *MIXTURES])
def test_way_back_is_the_source_byte_for_byte(root, name):
    assert contents(root / f"{name}-back") == contents(root / name)
    assert (len(list((root / name).glob("*.safetensors"))) > 2) == (name in SHARDED)


def test_one_piece_is_made_ahead_and_an_error_comes_in_its_turn():
    made = []
    second_is_made = threading.Event()

    def make():
        for item in range(3):
            made.append(item)
            if item == 1:
                second_is_made.set()
            yield item
        raise ConversionError("torn")

    ahead = offline._prefetched(make())
    assert next(ahead) == 0
    assert second_is_made.wait(timeout=30) and made == [0, 1]  # not 2, which takes the buffer of 0
    assert [next(ahead), next(ahead)] == [1, 2]
    with pytest.raises(ConversionError, match="torn"):
        next(ahead)


def test_tensors_of_one_parameter_must_have_one_type(tmp_path):
    family_model("llama-3", tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    tensors |= {
        name: tensor.bfloat16() for name, tensor in tensors.items() if ".layers.1.mlp.gate_proj." in name
    }
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    both = "layers.1.mlp.gate_proj.weight torch.bfloat16, model.layers.0.*.weight torch.float32 make up one"
    with pytest.raises(ConversionError, match=both):
        hf_to_mcore(tmp_path / "hf", tmp_path / "mcore")
    assert not (tmp_path / "mcore").exists()
    hf_to_mcore(tmp_path / "hf", tmp_path / "mcore", torch.bfloat16)


PLAIN = ("llama-1", "llama-2-70B", "llama-3", "mistral-nemo", "qwen-2", "qwen-2.5", "qwen-3")
"""Upstream's own model cannot be told every scaling of RoPE, nor a window on a CPU."""
LENGTHS = (1, 5, 16, 17, 100)
"""Around a window of 16, and across several of them."""


def _prompt(length: int) -> torch.Tensor:
    return torch.randint(0, 250, (2, length), generator=torch.Generator().manual_seed(length))


@torch.no_grad()
def _load(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    """Logits by family and prompt length: ours as imported, upstream's after its strict load; fused norms."""
    replace_torch("megatron.core.utils")  # upstream's own attention takes a buffer on the current device
    found = {}
    for name in (*FAMILIES, *MIXTURES):
        config = family_run(root / name, make_vocab_size_divisible_by=128)
        groups, (ours,) = build_stages(config)
        import_hf([ours.eval()], root / name, config.model, groups)
        found[name] = {length: ours(_prompt(length), None, None)[..., :250].numpy() for length in LENGTHS}
        is_known = traits_of(config.model).is_llama_like and not config.model.add_proj_bias
        if name in FAMILIES and is_known:  # upstream has no other norms, and all biases or none
            found[f"{name} by upstream"] = _load_upstream(root / f"{name}-mcore", config, groups)
        if name == "bloom":
            found["norms"] = _import_with_fused_norms(ours, root / name, config.model, groups)
        new_job()
    return found


def _load_upstream(folder: Path, config: Any, groups: Any) -> Any:
    model = upstream_stage(config, groups, 0).eval()
    stored = str(folder / "release")
    loaded = dist_checkpointing.load(model.sharded_state_dict(), stored, strict="raise_all")
    model.load_state_dict({key: value for key, value in loaded.items() if "." in key}, strict=True)
    assert not model.embedding.word_embeddings.weight[250:].any(), "padding"
    if folder.name.removesuffix("-mcore") not in PLAIN:
        return None
    mask = torch.ones(17, 17, dtype=torch.bool).triu(1)[None, None]
    return model(_prompt(17), torch.arange(17).expand(2, -1), mask)[..., :250].numpy()


THEIR_NORMS = {
    "self_attention.linear_qkv": "input_layernorm", "mlp.linear_fc1": "post_attention_layernorm"
}  # fmt: skip


def _import_with_fused_norms(model: Any, folder: Path, shape: Any, groups: Any) -> dict[str, object]:
    """The norms of a model whose parameters are named as Transformer Engine's layers name them."""
    for layer in model.decoder.layers:
        for norm, linear in (
            ("input_layernorm", "self_attention.linear_qkv"),
            ("pre_mlp_layernorm", "mlp.linear_fc1"),
        ):
            for kind, parameter in layer.get_submodule(norm).named_parameters():
                layer.get_submodule(linear).register_parameter(f"layer_norm_{kind}", parameter)
                parameter.fill_(0)
            delattr(layer, norm)
    import_hf([model], folder, shape, groups)
    return {name: weight.detach().numpy() for name, weight in model.named_parameters() if "norm" in name}


@pytest.fixture(scope="module")
def found(root) -> dict[str, Any]:
    return run_distributed(_load, 1, root)[0]


@pytest.mark.parametrize("name", [*FAMILIES, *MIXTURES])
@torch.no_grad()
def test_logits_of_ours_and_of_upstreams_plain_model_are_those_of_transformers(root, found, name):
    model, by_upstream = family_model(name), found.get(f"{name} by upstream")
    for length in LENGTHS:
        expected = model(_prompt(length)).logits
        torch.testing.assert_close(torch.from_numpy(found[name][length]), expected, rtol=0, atol=1e-4)
        if length == 17 and by_upstream is not None:
            torch.testing.assert_close(torch.from_numpy(by_upstream), expected, rtol=0, atol=1e-4)
    assert (by_upstream is not None) == (name in PLAIN)


def test_norms_are_found_under_transformer_engines_names(root, found):
    stored, ours = load_file(root / "bloom" / "model.safetensors"), found["norms"]
    for layer, kind, linear in itertools.product((0, 1), ("weight", "bias"), THEIR_NORMS):
        values = torch.from_numpy(ours[f"decoder.layers.{layer}.{linear}.layer_norm_{kind}"])
        assert torch.equal(values, stored[f"transformer.h.{layer}.{THEIR_NORMS[linear]}.{kind}"])
    assert len(ours) == 12


@pytest.mark.parametrize("size", ["5GB", "60KB"])
def test_files_as_bigscience_publishes_them_are_read(tmp_path, size):
    """Tensors without `transformer.`, a config.json with older names; written are those of transformers."""
    theirs = family_model("bloom")
    theirs.base_model.save_pretrained(tmp_path / "hf", max_shard_size=size)
    path = tmp_path / "hf" / "config.json"
    described = json.loads(path.read_text()) | {"architectures": ["BloomForCausalLM"], "pretraining_tp": 4}
    described |= {"n_embed": described.pop("hidden_size"), "num_attention_heads": described.pop("n_head")}
    path.write_text(json.dumps(described))
    hf_to_mcore(tmp_path / "hf", tmp_path / "mcore")
    assert json.loads((tmp_path / "mcore" / "config.json").read_text()) == described
    for source in (None, tmp_path / "hf"):
        mcore_to_hf(tmp_path / "mcore", tmp_path / "back", source, overwrite=True)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "back").state_dict()
        for name, tensor in theirs.state_dict().items():
            assert torch.equal(again[name], tensor), name
