"""config.json of transformers 4 and 5, checked against what transformers itself reads and writes."""

import json
import os
from pathlib import Path

import pytest
from refusals import refused

from patch.errors import ConfigError
from patch.preflight.model_of_folder import read_hf_config

ROPE = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def _write(folder, values):
    (folder / "config.json").write_text(json.dumps(values))
    return folder


MINIMAL = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 100,
}  # fmt: skip


@pytest.mark.parametrize("theta", [{}, {"rope_theta": 2e5}])
@pytest.mark.parametrize("scaling", [None, ROPE, {**ROPE, "factor": 8.0, "rope_theta": 3e5}])
def test_spellings_that_disagree_mean_what_transformers_means(tmp_path, theta, scaling):
    from transformers import LlamaConfig

    five = {**ROPE, "factor": 16.0, "rope_theta": 4e5}
    _write(tmp_path, {**MINIMAL, **theta, "rope_scaling": scaling, "rope_parameters": five})
    ours, theirs = read_hf_config(tmp_path), LlamaConfig.from_pretrained(tmp_path).rope_parameters
    assert (ours["rotary_base"], ours["rope_scaling_factor"]) == (theirs["rope_theta"], theirs["factor"])


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


def test_unreadable_file_is_named_and_a_sparse_one_is_not_held(tmp_path):
    file = tmp_path / "config.json"
    for text, said in (
        (None, "cannot be read: No such file"), ("{", "malformed JSON"), ("[]", "got a JSON list"),
        ("[" * 100_000, "malformed JSON"), ("1" * 5000, "malformed JSON"),
        ("", "cannot be read: got 8589934592 bytes"),
    ):  # fmt: skip
        if text is not None:
            file.write_text(text)
        if text == "":
            os.truncate(file, 1 << 33)
        with pytest.raises(ConfigError, match=f"{file}: {said}"):
            read_hf_config(tmp_path)


def test_adapters_gguf_and_metas_form_are_named_to_the_converter_too(command):
    """What a run says of them is in checks/answers.txt."""
    folder = Path(command.hf_folder()) / "original"
    folder.mkdir()
    (folder / "params.json").write_text("{}")
    with refused(ConfigError, rf"^{folder}: LLaMA in Meta's original form .*: {folder.parent}$"):
        read_hf_config(folder)
    _write(folder, MINIMAL)  # a description alone is no model
    (folder / "llama-Q4_K_M.gguf").touch()
    with refused(ConfigError, rf"^{folder}: weights in GGUF \(llama-Q4_K_M.gguf\), expected"):
        read_hf_config(folder)
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "llama/8B"}')
    with refused(ConfigError, f"^{folder}: a PEFT adapter of llama/8B, expected a whole model: give"):
        read_hf_config(folder)
    (folder / "model.safetensors").touch()
    assert read_hf_config(folder)
