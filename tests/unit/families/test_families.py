"""Families against transformers: classes, layers, all weights; public sizes against what is published."""

import dataclasses
from pathlib import Path

import hf_families
import pytest
import torch
import transformers
from hf_families import WITHOUT_CLASS
from safetensors import safe_open
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from patch.families import (
    FAMILIES,
    PRESETS,
    ConfigReader,
    ModelConfig,
    family_of,
    read_config,
    stored_rows,
)
from patch.plan.parameters import total_parameters


def _hf_model(model_type: str):
    """Two layers of a family's own default shape, without memory."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](num_hidden_layers=2))


@pytest.mark.parametrize("model_type", [each for each in FAMILIES if each not in WITHOUT_CLASS])
def test_class_and_traits_are_those_of_transformers(model_type):
    assert FAMILIES[model_type].architecture == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    traits, theirs = FAMILIES[model_type].traits, _hf_model(model_type)
    body = theirs.base_model
    layer = (body.h if model_type == "bloom" else body.layers)[0]
    of_layer = dict(layer.named_modules())
    assert type(layer.post_attention_layernorm).__name__.endswith(traits.normalization)
    norms = [name for name in of_layer if name.endswith("layernorm") and "." not in name]
    assert len(norms) == (4 if traits.norm_placement == "both" else 2)
    assert ("input_layernorm" in norms) == (traits.norm_placement != "behind")
    assert getattr(theirs.config, FAMILIES[model_type].activation_key, None) in (traits.activation, None)
    has_gate = not {"mlp.up_proj", "mlp.gate_up_proj", "mlp.experts"}.isdisjoint(of_layer)
    assert has_gate == traits.gated_linear_unit
    assert ("self_attn.q_norm" in of_layer) == traits.qk_layernorm
    if traits.qk_layernorm:
        width = of_layer["self_attn.q_norm"].weight.numel()
        assert (width > layer.self_attn.head_dim) == (traits.qk_norm_of == "all heads")
    linear = {name.split(".")[-1]: each for name, each in of_layer.items() if hasattr(each, "in_features")}
    with_bias = {name for name, each in linear.items() if each.bias is not None}
    has_bias = traits.add_qkv_bias
    if "add_qkv_bias" in FAMILIES[model_type].flags:
        has_bias = theirs.config.attention_bias  # the class's default
    of_qkv = {"q_proj", "k_proj", "v_proj"} if has_bias else set()
    assert with_bias == (set(linear) if traits.add_bias_linear else of_qkv)
    assert hasattr(body, "rotary_emb") == traits.has_rope
    assert hasattr(body, "word_embeddings_layernorm") == traits.embedding_norm


@pytest.mark.parametrize("name", [*hf_families.FAMILIES, *hf_families.MIXTURES])
def test_weights_have_the_names_and_shapes_of_transformers_and_give_the_family(tmp_path, name):
    """Where no family is stored, it is the first one that computes the same."""
    theirs = hf_families.family_model(name, tmp_path).config
    model = hf_families.family_run(tmp_path).model
    ours = {
        tensor.replace("*", str(layer)).replace("#", str(expert)): shape
        for row in stored_rows(model)
        for layer in row.layers
        for expert in range(row.num_experts)
        for tensor, shape in row.hf.items()
    }
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert ours == {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    assert family_of(model) is FAMILIES[theirs.model_type]
    # Without a window a Mistral is a LLaMA, with it Phi-3 is a Mistral; that layers are BLOOM's, or have
    # other norms, nothing but their family's name says.
    first = {"mistral-nemo": "llama", "bloom": "llama", "phi-3": "mistral"}.get(name, theirs.model_type)
    if FAMILIES[first].traits.is_llama_like:
        assert family_of(dataclasses.replace(model, model_type=None)) is FAMILIES[first]



def test_llama_with_alibi_is_not_baichuan_whose_weights_have_other_names(tmp_path):
    hf_families.family_model("llama-3", tmp_path)
    model = hf_families.family_run(tmp_path, position_embedding_type="alibi", rotary_base=10000.0).model
    assert model.model_type == "llama" and family_of(model) is None
    assert family_of(dataclasses.replace(model, model_type="baichuan")) is FAMILIES["baichuan"]


# total parameters as the model cards and papers give them, in billions
PUBLIC_BILLIONS = {
    "bloom-560m": 0.559, "bloom-1b1": 1.065, "bloom-1b7": 1.722, "bloom-3b": 3.003, "bloom-7b1": 7.069,
    "bloom-176b": 176.247,
    "1B": 1.24, "3B": 3.21, "8B": 8.03, "70B": 70.6, "405B": 405.9, "llama2-7B": 6.74, "llama2-13B": 13.0,
    "llama2-70B": 68.98, "llama1-7B": 6.74, "llama1-13B": 13.0, "llama1-30B": 32.5, "llama1-65B": 65.2,
    "8x7B": 46.7, "A2.7B": 14.3, "57B-A14B": 57.4, "30B-A3B": 30.5, "235B-A22B": 235.1,
    "deepseek-v2-lite": 15.7, "deepseek-v2": 235.7,
    "moonlight-16B-A3B": 15.96, "deepseek-v3": 671.0, "kimi-k2": 1026.0, "glm-4.5-air": 106.85,
}  # fmt: skip


@pytest.mark.parametrize(("size", "billions"), PUBLIC_BILLIONS.items())
def test_preset_has_the_public_number_of_parameters(size, billions):
    found = total_parameters(ModelConfig(**PRESETS[size], seq_length=1))
    assert found / 1e9 == pytest.approx(billions, rel=0.005)


def test_llama3_presets_agree_with_metas_package():
    sku_list = pytest.importorskip("llama_models.sku_list")
    ours = {"Llama3.1-8B": "8B", "Llama3.1-70B": "70B", "Llama3.2-1B": "1B", "Llama3.2-3B": "3B"}
    found = {m.descriptor(): m.arch_args for m in sku_list.all_registered_models() if m.descriptor() in ours}
    assert found.keys() == ours.keys()
    for name, theirs in found.items():
        shape = PRESETS[ours[name]]
        assert shape["hidden_size"] == theirs["dim"]
        assert shape["num_layers"] == theirs["n_layers"]
        assert shape["num_attention_heads"] == theirs["n_heads"]
        assert shape["num_query_groups"] == theirs["n_kv_heads"]
        assert shape["vocab_size"] == theirs["vocab_size"]
        assert shape["norm_epsilon"] == theirs["norm_eps"]
        assert shape["rotary_base"] == theirs["rope_theta"]


V3 = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "hidden_act": "silu",
    "attention_bias": False, "aux_loss_alpha": 0.001, "ep_size": 1, "first_k_dense_replace": 1,
    "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512, "moe_intermediate_size": 2048,
    "moe_layer_freq": 1, "n_group": 1, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "scoring_func": "sigmoid", "seq_aux": True,
    "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 128,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}  # fmt: skip
YARN = {
    "type": "yarn", "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
PUBLISHED = {
    "deepseek-v3": {
        "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "n_routed_experts": 256,
        "num_attention_heads": 128, "num_key_value_heads": 128, "routed_scaling_factor": 2.5,
        "max_position_embeddings": 163840, "rope_theta": 10000, "rope_scaling": YARN, "vocab_size": 129280,
        "num_nextn_predict_layers": 1,
    },
    "kimi-k2": {
        "model_type": "kimi_k2", "n_routed_experts": 384, "num_attention_heads": 64,
        "num_key_value_heads": 64, "routed_scaling_factor": 2.827, "max_position_embeddings": 131072,
        "rope_theta": 50000.0, "rope_scaling": YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
        "vocab_size": 163840, "num_nextn_predict_layers": 0,
    },
    "moonlight-16B-A3B": {
        "hidden_size": 2048, "intermediate_size": 11264, "moe_intermediate_size": 1408,
        "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None,
        "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2, "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 2.446, "max_position_embeddings": 8192, "rope_theta": 50000.0,
        "rope_scaling": None, "vocab_size": 163840, "num_nextn_predict_layers": 0,
        "quantization_config": None,
    },
    "glm-4.5-air": {
        "model_type": "glm4_moe", "attention_bias": True, "hidden_size": 4096, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "n_routed_experts": 128, "num_hidden_layers": 46, "head_dim": 128,
        "num_attention_heads": 96, "num_key_value_heads": 8, "use_qk_norm": False, "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 1.0, "max_position_embeddings": 131072, "rope_theta": 1000000,
        "rope_scaling": None, "partial_rotary_factor": 0.5, "vocab_size": 151552,
        "num_nextn_predict_layers": 1, "quantization_config": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("size", PUBLISHED)
def test_presets_with_deepseek_v3s_router_are_the_published_config_json(size):
    fields = read_config(ConfigReader(Path("config.json"), V3 | PUBLISHED[size]))
    preset = ModelConfig(**PRESETS[size], seq_length=1)
    assert {name: getattr(preset, name) for name in fields} == fields
