"""Families against transformers: classes, layers, and the names and shapes of all weights."""

import dataclasses

import hf_families
import pytest
import torch
import transformers
from small_runs import small_run
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from patch.config.model_schema import SHAPE_FIELDS
from patch.families import FAMILIES, TYPE_FIELDS, WEIGHT_FIELDS, ModelShape, family_of, weight_rows


def _hf_model(model_type: str):
    """Two layers of a family's own default shape, without memory."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](num_hidden_layers=2))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_architecture_is_the_class_in_transformers(model_type):
    assert FAMILIES[model_type].architecture == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_traits_are_those_of_the_layers_of_transformers(model_type):
    traits, theirs = FAMILIES[model_type].traits, _hf_model(model_type)
    layer, biased = theirs.model.layers[0], {name for name, _ in theirs.named_parameters() if "bias" in name}
    assert type(layer.input_layernorm).__name__.endswith(traits.normalization)
    assert theirs.config.hidden_act == traits.activation
    assert hasattr(layer.mlp, "up_proj") == traits.gated_linear_unit
    assert hasattr(layer.self_attn, "q_norm") == traits.qk_layernorm
    with_bias = {name.split(".")[-2] for name in biased}
    assert with_bias == ({"q_proj", "k_proj", "v_proj"} if traits.add_qkv_bias else set())
    assert hasattr(theirs.model, "rotary_emb") == (traits.position_embedding_type == "rope")


@pytest.mark.parametrize("name", hf_families.FAMILIES)
def test_weights_have_the_names_and_shapes_of_transformers(tmp_path, name):
    theirs = hf_families.family_model(name, tmp_path)
    model = hf_families.family_run(tmp_path).model
    ours = {
        tensor.replace("*", str(layer)): shape
        for row in weight_rows(model)
        for layer in range(model.num_layers if row.is_per_layer else 1)
        for tensor, shape in row.hf.items()
    }
    assert ours == {key: tuple(tensor.shape) for key, tensor in theirs.named_parameters()}


@pytest.mark.parametrize("name", hf_families.FAMILIES)
def test_family_is_found_again_by_the_fields_of_its_models(tmp_path, name):
    theirs = hf_families.family_model(name, tmp_path).config
    model = hf_families.family_run(tmp_path).model
    found = family_of(model, theirs.model_type)
    assert found is not None and found.model_type == theirs.model_type
    first = family_of(model)
    # without a window a Mistral is a LLaMA
    assert first is found or (name, first) == ("mistral-nemo", FAMILIES["llama"])


def test_traits_that_no_family_has_belong_to_none_and_have_llamas_names():
    model = small_run(add_qkv_bias=True, qk_layernorm=True).model
    assert family_of(model) is None and family_of(model, "qwen3") is None
    names = {tensor for row in weight_rows(model) for tensor in row.hf}
    assert {"model.layers.*.self_attn.q_proj.bias", "model.layers.*.self_attn.q_norm.weight"} <= names


def test_named_family_that_does_not_compute_the_model_is_passed_over():
    slid = family_of(small_run(window_size=(7, 0)).model, "llama")
    assert slid is FAMILIES["mistral"]


def test_a_family_may_read_what_describes_a_shape():
    found = {name for name, member in vars(ModelShape).items() if isinstance(member, property)}
    assert found == SHAPE_FIELDS
    assert WEIGHT_FIELDS < SHAPE_FIELDS and TYPE_FIELDS < SHAPE_FIELDS


@pytest.mark.parametrize("field", sorted(SHAPE_FIELDS - {"num_layers"}))
def test_weights_change_with_the_fields_that_are_said_to_decide_them(field):
    model = small_run().model
    value = getattr(model, field)
    absent = {"window_size": (7, 0), "yarn_attention_factor": 0.9}
    changed = absent.get(field, not value if isinstance(value, bool) else value and 2 * value)
    other = dataclasses.replace(model, **{field: changed})
    assert (weight_rows(other) != weight_rows(model)) == (field in WEIGHT_FIELDS)
