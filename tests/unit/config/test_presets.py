"""Preset shapes against the public ones, by another source than the table itself."""

import pytest
from refusals import refused

from patch.config.model_schema import MODEL_SIZES, PRESETS
from patch.config.schema import ModelConfig
from patch.errors import ConfigError

# total parameters as the model cards and papers give them, in billions
PUBLIC_BILLIONS = {
    "1B": 1.24,
    "3B": 3.21,
    "8B": 8.03,
    "70B": 70.6,
    "405B": 405.9,
    "llama2-7B": 6.74,
    "llama2-13B": 13.0,
    "llama2-70B": 68.98,
    "llama1-7B": 6.74,
    "llama1-13B": 13.0,
    "llama1-30B": 32.5,
    "llama1-65B": 65.2,
}


@pytest.mark.parametrize("size", PRESETS)
def test_preset_names_fields_of_the_model(size):
    ModelConfig(model_size=size, seq_length=8, **PRESETS[size])


@pytest.mark.parametrize(("size", "billions"), PUBLIC_BILLIONS.items())
def test_preset_has_the_public_number_of_parameters(size, billions):
    shape = PRESETS[size]
    hidden, groups = shape["hidden_size"], shape["num_query_groups"] * shape["kv_channels"]
    query = shape["num_attention_heads"] * shape["kv_channels"]
    layer = 2 * hidden * (query + groups) + 3 * hidden * shape["ffn_hidden_size"] + 2 * hidden
    tables = 2 if shape["untie_embeddings_and_output_weights"] else 1
    total = shape["num_layers"] * layer + (tables * shape["vocab_size"] + 1) * hidden
    assert total / 1e9 == pytest.approx(billions, rel=0.005)


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


def test_llama1_epsilon_changed_at_65b():
    assert [PRESETS[f"llama1-{size}"]["norm_epsilon"] for size in ("7B", "13B", "30B", "65B")] == [
        *[1e-6] * 3,
        1e-5,
    ]


def test_contract_lists_these_sizes():
    assert MODEL_SIZES == (
        *("tiny", "1B", "3B", "8B", "70B", "405B", "llama2-7B", "llama2-13B", "llama2-70B"),
        *("llama1-7B", "llama1-13B", "llama1-30B", "llama1-65B", "auto"),
    )


def test_auto_reads_the_folder_at_position_22(command):
    config = command.parse(MODEL_SIZE="auto", PRETRAIN_CHECKPOINT_PATH=command.hf_folder()).config
    model = config.model
    assert (model.vocab_size, model.hidden_size, model.rope_scaling_factor) == (600, 64, 4.0)
    assert (model.rope_low_freq_factor, model.rope_original_max_position) == (2.0, 128)


def test_auto_without_a_folder_says_what_it_needs(command):
    with refused(ConfigError, match=r"position 2 MODEL_SIZE\): auto reads .* \(position 22"):
        command.parse(MODEL_SIZE="auto")
