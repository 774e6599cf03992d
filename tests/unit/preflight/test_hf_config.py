"""config.json of transformers 4 and 5, checked against what transformers itself reads and writes."""

import json
import os
from pathlib import Path

import pytest
from refusals import refused

from patch.errors import ConfigError
from patch.preflight.stored_shape import is_hf_folder, read_hf_config

ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _write(folder, values):
    (folder / "config.json").write_text(json.dumps(values))
    return folder


MINIMAL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


def test_folder_is_told_by_its_config(tmp_path):
    assert not is_hf_folder(tmp_path)
    assert is_hf_folder(_write(tmp_path, MINIMAL))


def test_both_spellings_of_rope_give_one_shape(tmp_path):
    four = read_hf_config(_write(tmp_path, {**MINIMAL, "rope_theta": 5e5, "rope_scaling": ROPE}))
    five = read_hf_config(_write(tmp_path, {**MINIMAL, "rope_parameters": {**ROPE, "rope_theta": 5e5}}))
    assert four == five
    assert four["use_rope_scaling"] and four["rotary_base"] == 5e5
    scaling = [four[f"rope_{name}"] for name in ("scaling_factor", "low_freq_factor", "high_freq_factor")]
    assert [*scaling, four["rope_original_max_position"]] == [32.0, 1.0, 4.0, 8192]


@pytest.mark.parametrize("theta", [{}, {"rope_theta": 2e5}])
@pytest.mark.parametrize("scaling", [None, ROPE, {**ROPE, "factor": 8.0, "rope_theta": 3e5}])
def test_spellings_that_disagree_mean_what_transformers_means(tmp_path, theta, scaling):
    from transformers import LlamaConfig

    five = {**ROPE, "factor": 16.0, "rope_theta": 4e5}
    _write(tmp_path, {**MINIMAL, **theta, "rope_scaling": scaling, "rope_parameters": five})
    ours, theirs = read_hf_config(tmp_path), LlamaConfig.from_pretrained(tmp_path).rope_parameters
    assert (ours["rotary_base"], ours["rope_scaling_factor"]) == (theirs["rope_theta"], theirs["factor"])


def test_rope_type_may_be_spelled_type(tmp_path):
    rope = {**ROPE, "type": "llama3"}
    del rope["rope_type"]
    assert read_hf_config(_write(tmp_path, {**MINIMAL, "rope_scaling": rope}))["use_rope_scaling"]


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_absent_keys_mean_what_transformers_means(tmp_path, name):
    import transformers

    values = MINIMAL | {"model_type": name.lower(), "num_attention_heads": 64}
    theirs = getattr(transformers, f"{name}Config")(**values)
    ours = read_hf_config(_write(tmp_path, values))
    assert ours["num_query_groups"] == theirs.num_key_value_heads
    assert ours["kv_channels"] == (getattr(theirs, "head_dim", None) or 1)
    assert ours["norm_epsilon"] == theirs.rms_norm_eps
    assert ours["max_position_embeddings"] == theirs.max_position_embeddings
    assert ours["untie_embeddings_and_output_weights"] == (not theirs.tie_word_embeddings)
    assert ours["rotary_base"] == theirs.rope_parameters["rope_theta"]
    assert ours["window_size"] == ((4095, 0) if name == "Mistral" else None)
    assert theirs.get_text_config().to_dict().get("sliding_window") == (4096 if name == "Mistral" else None)
    assert not ours["use_rope_scaling"]


@pytest.mark.parametrize("tied", [True, False])
def test_what_transformers_saves_is_read_back(tmp_path, tied):
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=321, hidden_size=96, intermediate_size=200, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=32, rms_norm_eps=1e-4, max_position_embeddings=777,
        tie_word_embeddings=tied, rope_parameters={**ROPE, "rope_theta": 1234.0},
    ).save_pretrained(tmp_path)  # fmt: skip
    shape = read_hf_config(tmp_path)
    assert (shape["vocab_size"], shape["hidden_size"], shape["ffn_hidden_size"]) == (321, 96, 200)
    assert (shape["num_layers"], shape["num_attention_heads"], shape["num_query_groups"]) == (3, 6, 2)
    assert (shape["kv_channels"], shape["norm_epsilon"], shape["max_position_embeddings"]) == (32, 1e-4, 777)
    assert shape["untie_embeddings_and_output_weights"] is not tied
    assert (shape["rotary_base"], shape["rope_scaling_factor"]) == (1234.0, 32.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type: got 'gpt2', expected one of llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "model_type: got None, expected one of llama"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias: got True, expected False"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window: got 0, expected at least 1"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1},
            "max_window_layers: got 1, expected the same attention in all layers",
        ),
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            "layer_types: got ['full_attention', 'sliding_attention'], expected the same attention",
        ),
        *(
            (
                {"model_type": "qwen2", "use_sliding_window": True, "layer_types": kinds},
                f"layer_types: {said}",
            )
            for kinds, said in (
                (5, "got 5, expected a list"),
                ({"a": 1}, "got {'a': 1}, expected a list"),
                ([["a"], ["b"]], "got [['a'], ['b']], expected the same attention"),
            )
        ),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: got 1000000000, expected at most 10000"),
        (
            {"num_hidden_layers": 10**9, "model_type": "qwen2", "use_sliding_window": True},
            "num_hidden_layers: got 1000000000, expected at most 10000",
        ),
        ({"vocab_size": 10**400}, "vocab_size: got 100000"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps: got 100000"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings: got 'false', expected true or false"),
        (
            {"model_type": "qwen2", "use_sliding_window": 1},
            "use_sliding_window: got 1, expected true or false",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: got 0.5, expected 1.0"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "expected an object for all layers"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu', expected 'silu'"),
        ({"attention_bias": True}, "attention_bias: got True, expected False"),
        ({"mlp_bias": True}, "mlp_bias: got True, expected False"),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2.0}},
            "rope_type: got 'longrope', expected one of default, llama3, linear, dynamic, yarn",
        ),
        ({"rope_scaling": {"type": "dynamic"}}, "factor: got None, expected a finite number"),
        (
            {"rope_parameters": {"rope_type": "yarn", "truncate": 1}},
            "truncate: got 1, expected true or false",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 0}},
            "original_max_position_embeddings: got 0, expected at least 1",
        ),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor: got None, expected a finite number"),
        ({"rope_parameters": [1]}, "rope_parameters: got [1], expected an object"),
        ({"hidden_size": "wide"}, "hidden_size: got 'wide', expected a whole number"),
        ({"model_type": ["llama"]}, "model_type: got ['llama'], expected one of llama"),
        ({"vocab_size": None}, "vocab_size: got None, expected a whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads: got 0, expected at least 1"),
        (
            {"quantization_config": {"bits": 4}},
            "quantization_config: got {'bits': 4}, expected none: the model that these quantised weights",
        ),
    ],
)
def test_unsupported_model_is_refused_by_name(tmp_path, changes, message):
    with pytest.raises(ConfigError) as caught:
        read_hf_config(_write(tmp_path, {**MINIMAL, **changes}))
    assert message in str(caught.value) and "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "malformed JSON"),
        ("[]", "got a JSON list"),
        ("[" * 100_000, "malformed JSON"),
        ("1" * 5000, "malformed JSON"),
    ],
)
def test_malformed_json_names_the_file(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=f"{tmp_path}/config.json: {message}"):
        read_hf_config(tmp_path)


def test_missing_config_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read: No such file"):
        read_hf_config(tmp_path)


def test_sparse_config_is_refused_without_holding_it(tmp_path):
    (tmp_path / "config.json").touch()
    os.truncate(tmp_path / "config.json", 1 << 33)
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read: got 8589934592 bytes"):
        read_hf_config(tmp_path)


def _original(folder: Path) -> Path:
    folder.mkdir()
    for name in ("params.json", "consolidated.00.pth", "tokenizer.model"):
        (folder / name).write_text("{}")
    return folder


def test_adapters_and_gguf_are_named_with_their_cure(command):
    folder = command.folder / "given"
    folder.mkdir()
    (folder / "llama-Q4_K_M.gguf").touch()
    gguf = rf"{folder}[:,] weights in GGUF \(llama-Q4_K_M.gguf\), expected a Hugging Face folder: .*gguf_file"
    with refused(ConfigError, rf"^--load \(position 22 .*: got {gguf}"):
        command.parse(MODEL_SIZE="auto", PRETRAIN_CHECKPOINT_PATH=str(folder))
    with refused(ConfigError, f"^{gguf}"):
        read_hf_config(folder)
    with refused(ConfigError, r"^--load .*/llama-Q4_K_M.gguf, weights in GGUF \(llama-Q4_K_M.gguf\)"):
        command.parse(MODEL_SIZE="auto", PRETRAIN_CHECKPOINT_PATH=str(folder / "llama-Q4_K_M.gguf"))
    _write(folder, MINIMAL)  # a description alone is no model
    with refused(ConfigError, f"^{gguf}"):
        read_hf_config(folder)
    (folder / "model.safetensors").touch()
    assert read_hf_config(folder)
    (folder / "model.safetensors").unlink()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "llama/8B"}')
    with refused(ConfigError, f"^{folder}: a PEFT adapter of llama/8B, expected a whole model: merge"):
        read_hf_config(folder)


def test_metas_original_form_is_named_with_the_place_of_the_other_one(command):
    form = r"LLaMA in Meta's original form \(params.json, .* expected its Hugging Face form \(config.json, "
    folder = _original(command.folder / "llama")
    with refused(ConfigError, rf"^--load \(position 22 .*: got {folder}, {form}.*: a repository of the hub "):
        command.parse(MODEL_SIZE="auto", PRETRAIN_CHECKPOINT_PATH=str(folder))
    inside = _original(Path(command.hf_folder()) / "original")
    with refused(ConfigError, rf"^--load \(position 22 .*: got {inside}, {form}.*: {inside.parent}$"):
        command.parse(PRETRAIN_CHECKPOINT_PATH=str(inside))
    command.environ["TOKENIZER_PATH"] = str(folder)
    with refused(ConfigError, rf"^--tokenizer-name-or-path .*: got {folder}, {form}"):
        command.parse()
    (folder / "tokenizer_config.json").write_text("{}")
    assert command.parse().config.tokenizer_folder == str(folder)
