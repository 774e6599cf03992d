"""Hugging Face folder -> torch_dist checkpoint -> Hugging Face folder: every family, bit for bit.

The oracle of the checkpoint is upstream's plain GPTModel after upstream's strict load, beside transformers.
"""

import threading
from pathlib import Path

import pytest
import torch
from distributed_runner import run_distributed
from hf_families import FAMILIES, family_model, family_run
from safetensors.torch import load_file, save_file

from patch.convert import ConversionError, hf_to_mcore, mcore_to_hf, offline

SHARDED = "qwen-2"


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Each family as NAME, converted as NAME-mcore and back as NAME-back; pieces of a few rows."""
    root = tmp_path_factory.mktemp("stream")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offline, "WINDOW_BYTES", 5000)
        for name in FAMILIES:
            family_model(name, root / name, **({"max_shard_size": "60KB"} if name == SHARDED else {}))
            (root / name / "tokenizer.json").write_text('{"a": 1}')
            hf_to_mcore(root / name, root / f"{name}-mcore")
            mcore_to_hf(root / f"{name}-mcore", root / f"{name}-back")
    return root


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", FAMILIES)
def test_way_back_is_the_source_byte_for_byte(root, name):
    assert contents(root / f"{name}-back") == contents(root / name)
    assert len(list((root / name).glob("*.safetensors"))) == (7 if name == SHARDED else 1)


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

    ahead = offline._made_ahead(make())
    assert next(ahead) == 0
    assert second_is_made.wait(timeout=30) and made == [0, 1]  # not 2, which takes the buffer of 0
    assert [next(ahead), next(ahead)] == [1, 2]
    with pytest.raises(ConversionError, match="torn"):
        next(ahead)


@pytest.mark.parametrize(
    ("changed", "named"), [("1.mlp.gate_proj.", "1.mlp.gate_proj"), ("1.", "1.input_layernorm")]
)
def test_tensors_of_one_parameter_must_have_one_type(tmp_path, changed, named):
    family_model("llama-3", tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    tensors |= {
        name: tensor.bfloat16() for name, tensor in tensors.items() if f"model.layers.{changed}" in name
    }
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    both = rf"model.layers.{named}.weight torch.bfloat16, model.layers.0.*.weight torch.float32 make up one"
    with pytest.raises(ConversionError, match=both):
        hf_to_mcore(tmp_path / "hf", tmp_path / "mcore")
    assert not (tmp_path / "mcore").exists()
    hf_to_mcore(tmp_path / "hf", tmp_path / "mcore", torch.bfloat16)


PLAIN = ("llama-1", "llama-2-70B", "llama-3", "mistral-nemo", "qwen-2", "qwen-2.5", "qwen-3")
"""Upstream's own model cannot be told every scaling of RoPE, nor a window on a CPU."""
TOKENS = torch.arange(2 * 12).reshape(2, 12) * 7 % 250


@torch.no_grad()
def _load_upstream(rank: int, world_size: int, root: Path) -> dict[str, object]:
    """Logits of upstream's model after upstream's strict load, by family; None where it has no such model."""
    from megatron.core import dist_checkpointing
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from patch import compat
    from patch.compat.cpu import replace_torch
    from patch.device import DeviceContext
    from patch.distributed.groups import initialize
    from patch.model.llama import transformer_config

    compat.apply(cuda=False)
    replace_torch("megatron.core.utils")  # upstream's own attention takes a buffer on the current device
    groups, found = None, {}
    mask = torch.ones(12, 12, dtype=torch.bool).triu(1)[None, None]
    for name in FAMILIES:
        config = family_run(root / name, make_vocab_size_divisible_by=128)
        groups = groups or initialize(config, DeviceContext(torch.device("cpu"), "gloo"))
        model_parallel_cuda_manual_seed(1)
        model = GPTModel(
            transformer_config(config.model, groups, config.execution, cuda=False),
            get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.model.qk_layernorm),
            config.padded_vocab_size, 64, position_embedding_type="rope", pg_collection=groups,
            share_embeddings_and_output_weights=not config.model.untie_embeddings_and_output_weights,
            rotary_base=config.model.rotary_base,
        ).eval()  # fmt: skip
        folder = root / f"{name}-mcore" / "release"
        loaded = dist_checkpointing.load(model.sharded_state_dict(), str(folder), strict="raise_all")
        model.load_state_dict({key: value for key, value in loaded.items() if "." in key}, strict=True)
        assert not model.embedding.word_embeddings.weight[250:].any(), "padding"
        is_plain = name in PLAIN
        logits = model(TOKENS, torch.arange(12).expand(2, -1), mask)[..., :250] if is_plain else None
        found[name] = logits if logits is None else logits.numpy()
    return found


def test_upstreams_plain_model_loads_strictly_what_we_import_and_has_transformers_logits(root):
    (found,) = run_distributed(_load_upstream, 1, root)
    for name in PLAIN:
        with torch.no_grad():
            expected = family_model(name)(TOKENS).logits
        torch.testing.assert_close(torch.from_numpy(found[name]), expected, atol=1e-4, rtol=0)
