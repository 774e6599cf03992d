"""Hugging Face folder -> torch_dist checkpoint -> Hugging Face folder: every family, bit for bit.

The oracle of the checkpoint is upstream's plain GPTModel with upstream's own strict load.
"""

import threading
from pathlib import Path

import pytest
import torch
from distributed_runner import run_distributed
from hf_families import FAMILIES, family_model, family_run
from safetensors.torch import load_file, save_file

from patch.convert import ConversionError, hf_to_mcore, mcore_to_hf, offline_import

SHARDED = "qwen-2"


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Each family as NAME, converted as NAME-mcore and back as NAME-back; pieces of a few rows."""
    root = tmp_path_factory.mktemp("stream")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offline_import, "WINDOW_BYTES", 5000)
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

    ahead = offline_import._made_ahead(make())
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


def _load_upstream(rank: int, world_size: int, root: Path) -> dict[str, dict[str, object]]:
    """Parameters of upstream's model after upstream's strict load, by family."""
    from megatron.core import dist_checkpointing
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from patch import compat
    from patch.device import DeviceContext
    from patch.distributed.groups import initialize
    from patch.model.llama import transformer_config

    compat.apply(cuda=False)
    groups, found = None, {}
    for name in FAMILIES:
        config = family_run(root / name, make_vocab_size_divisible_by=128)
        groups = groups or initialize(config, DeviceContext(torch.device("cpu"), "gloo"))
        model_parallel_cuda_manual_seed(1)
        model = GPTModel(
            transformer_config(config.model, groups, config.execution, cuda=False),
            get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.model.qk_layernorm),
            config.padded_vocab_size, 64, position_embedding_type="rope", pg_collection=groups,
            share_embeddings_and_output_weights=not config.model.untie_embeddings_and_output_weights,
        )  # fmt: skip
        folder = root / f"{name}-mcore" / "release"
        loaded = dist_checkpointing.load(model.sharded_state_dict(), str(folder), strict="raise_all")
        model.load_state_dict({key: value for key, value in loaded.items() if "." in key}, strict=True)
        found[name] = {key: weight.detach().numpy() for key, weight in model.named_parameters()}
    return found


def test_upstreams_plain_model_loads_strictly_what_we_import(root):
    from patch.convert.hf_reader import HFFolder
    from patch.convert.mappings import TPShard
    from patch.convert.weight_table import parameter_table

    (found,) = run_distributed(_load_upstream, 1, root)
    for name, parameters in found.items():
        table = parameter_table(family_run(root / name).model, 256)
        source = HFFolder(root / name)
        for key, weight in parameters.items():
            layer = key.split(".")[2] if key.startswith("decoder.layers") else "0"
            mapping = table[key.replace(f"layers.{layer}.", "layers.*.")].at_layer(int(layer))
            expected = torch.empty(weight.shape)
            mapping.hf_to_megatron(expected, [source[tensor.name] for tensor in mapping.hf], TPShard(0, 1))
            assert torch.equal(torch.from_numpy(weight), expected), (name, key)
