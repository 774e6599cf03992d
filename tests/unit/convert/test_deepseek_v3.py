"""DeepSeek-V3's folders: weights in fp8 with scales, layers that predict further tokens, biases of experts.

The oracles are plain torch and the folder that transformers wrote.
"""

import json
from pathlib import Path

import pytest
import torch
from distributed_runner import run_distributed
from hf_families import family_model, family_run
from llama3_tokenizer import build_tiny_tokenizer
from packed_runs import build_untrained
from refusals import refused
from safetensors.torch import load_file, save_file

from patch.convert import ConversionError, hf_to_mcore, iter_hf_weights, mcore_to_hf
from patch.errors import ConfigError
from patch.preflight.weight_files import WeightHeaders, check_headers
from toolkits.chat import Conversation

SIZES = {"hidden_size": 160, "moe_intermediate_size": 136}
"""Not multiples of a block of 128."""


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each for path in folder.glob("*.safetensors") for name, each in load_file(path).items()}


def describe(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def in_fp8(folder: Path) -> dict[str, torch.Tensor]:
    """Store the matrices of layers in fp8, as DeepSeek does; return what plain torch makes of them."""
    found, stored = {}, {}
    for name, weight in tensors_of(folder).items():
        found[name] = stored[name] = weight if "e_score" in name else weight.bfloat16()
        if weight.ndim < 2 or ".layers." not in name or "gate.weight" in name:
            continue
        rows, columns = (-(-size // 128) for size in weight.shape)
        scales = torch.rand(rows, columns) + 0.5
        stored[name] = (weight * 100).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scales
        of_each = scales[torch.arange(len(weight)) // 128][:, torch.arange(weight.shape[1]) // 128]
        found[name] = (stored[name].float() * of_each).bfloat16()
    save_file(stored, folder / "model.safetensors")
    how = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    describe(folder, quantization_config=how)
    return found


def imported(rank: int, world_size: int, folder: Path) -> dict[str, object]:
    config = family_run(folder, 2, precision="bf16", sequence_parallel=True)
    run = build_untrained(config, folder)
    weights = iter_hf_weights(run.stages, config.model, run.groups)
    return {name: tensor.float().numpy() for name, tensor in weights}


def test_weights_in_fp8_are_those_of_plain_torch_in_a_model_and_in_a_checkpoint(tmp_path: Path) -> None:
    family_model("deepseek-v3", tmp_path / "hf", **SIZES)
    expected = in_fp8(tmp_path / "hf")
    assert len([1 for name in tensors_of(tmp_path / "hf") if name.endswith("_scale_inv")]) > 40
    for found in run_distributed(imported, 2, tmp_path / "hf"):
        assert found.keys() == expected.keys()
        assert all(torch.equal(torch.from_numpy(found[name]), expected[name].float()) for name in expected)
    hf_to_mcore(tmp_path / "hf", tmp_path / "mcore")
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    back = tensors_of(tmp_path / "back")
    assert back.keys() == expected.keys()
    for name, each in expected.items():
        assert back[name].dtype == each.dtype and torch.equal(back[name], each), name
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


def test_chat_takes_weights_in_fp8_on_a_cpu(tmp_path: Path) -> None:
    family_model("deepseek-v3", tmp_path, vocab_size=512, **SIZES)
    in_fp8(tmp_path)
    build_tiny_tokenizer(tmp_path)
    assert isinstance(Conversation(tmp_path, None, 2).answer("hello"), str)


def test_scales_of_other_blocks_are_refused(tmp_path: Path) -> None:
    family_model("deepseek-v3", tmp_path, **SIZES)
    in_fp8(tmp_path)
    stored = tensors_of(tmp_path)
    name = next(name for name in stored if name.endswith("_scale_inv"))
    save_file(stored | {name: torch.ones(9, 9)}, tmp_path / "model.safetensors")
    with pytest.raises(ConversionError, match="stored as F8_E4M3"):
        check_headers(WeightHeaders(tmp_path), family_run(tmp_path).model)
    describe(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [64, 64]})
    with refused(ConfigError, "quantization_config: got"):
        family_run(tmp_path)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["as it is", "bf16"])
def test_layers_that_predict_further_tokens_pass_through_a_conversion(tmp_path: Path, dtype: object) -> None:
    source = tmp_path / "hf"
    family_model("deepseek-v3", source, max_shard_size="200KB")
    layer = {
        "model.layers.2.eh_proj.weight": torch.randn(64, 128).bfloat16(),
        "model.layers.2.enorm.weight": torch.randn(64),
        "model.layers.2.mlp.gate.e_score_correction_bias": torch.randn(8),
    }
    with pytest.raises(ConversionError, match=r"model\.layers\.2\.\w+\.weight .*no place for"):
        save_file(layer, source / "mtp.safetensors")
        index = json.loads((source / "model.safetensors.index.json").read_text())
        index["weight_map"] |= dict.fromkeys(layer, "mtp.safetensors")
        (source / "model.safetensors.index.json").write_text(json.dumps(index))
        hf_to_mcore(source, tmp_path / "mcore")
    describe(source, num_nextn_predict_layers=1)
    hf_to_mcore(source, tmp_path / "mcore", dtype)
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    before, after = tensors_of(source), tensors_of(tmp_path / "back")
    assert before.keys() == after.keys()
    kept = [name for name in before if dtype is None or name in layer or "e_score" in name]
    assert all(torch.equal(after[name].view(torch.uint8), before[name].view(torch.uint8)) for name in kept)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    mcore_to_hf(tmp_path / "mcore", tmp_path / "without", source)
    assert not layer.keys() & tensors_of(tmp_path / "without").keys()
    assert json.loads((tmp_path / "without" / "config.json").read_text())["num_nextn_predict_layers"] == 0
