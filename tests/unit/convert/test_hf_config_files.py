"""config.json and generation_config.json: the source's where nothing changed, readable by transformers."""

import dataclasses
import json
import logging
import shutil
import warnings

import hf_families
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_runs import hf_llama, small_run
from transformers import AutoConfig, LlamaConfig

from patch.convert import hf_to_mcore, mcore_to_hf
from patch.convert.hf_config_files import (
    generation_description,
    model_description,
    write_config,
    write_descriptions,
)
from patch.data.tokenizer import load_tokenizer
from patch.errors import ConfigError, ConversionError, PatchError
from patch.preflight.model_of_folder import read_hf_config

CHAT = "{% for message in messages %}{{ message['content'] }}<|eot_id|>\n{% endfor %}"
EOS_CHAT = CHAT.replace("<|eot_id|>", "{{ eos_token }}")


def _write_json(folder, name, contents):
    (folder / name).write_text(json.dumps(contents))
    return folder


@pytest.fixture
def source(tmp_path):
    """A folder as transformers 5 writes it."""
    hf_llama(small_run(), tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def old_source(tmp_path, source):
    """The same in the spelling of transformers 4."""
    shutil.copytree(source, tmp_path / "old")
    hf_families.spell_as_4(tmp_path / "old")
    return tmp_path / "old"


@pytest.mark.parametrize("name", [*hf_families.FAMILIES, *hf_families.MIXTURES])
def test_config_of_every_family_is_written_without_a_source(tmp_path, name, tiny_tokenizer):
    theirs = hf_families.family_model(name, tmp_path).config
    model = hf_families.family_run(tmp_path).model
    _write_json(tmp_path, "config.json", model_description(model, None, tiny_tokenizer(), torch.float32))
    assert read_hf_config(tmp_path) == {
        field: value
        for field, value in dataclasses.asdict(model).items()
        if field in read_hf_config(tmp_path)
    }
    ours = AutoConfig.from_pretrained(tmp_path)
    assert ours.architectures == theirs.architectures
    for key in (
        "sliding_window", "layer_types", "head_dim", "rope_parameters", "num_experts", "num_local_experts",
        "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size", "norm_topk_prob",
        "mlp_only_layers", "decoder_sparse_step", "intermediate_size",
    ):  # fmt: skip
        given = getattr(theirs, key, None)
        # Some have no head_dim of their own: it follows from the others.
        assert getattr(ours, key, None) == given or (key == "head_dim" and given is None)


def test_window_taken_from_a_mistral_leaves_a_mistral(tmp_path, tiny_tokenizer):
    hf_families.family_model("mistral-0.1", tmp_path)
    before = json.loads((tmp_path / "config.json").read_text())
    model = hf_families.family_run(tmp_path, window_size=None).model
    after = model_description(model, tmp_path, tiny_tokenizer(), torch.float32)
    assert {key for key in before | after if before.get(key) != after.get(key)} == {"sliding_window"}


@pytest.mark.parametrize("name", [*hf_families.FAMILIES, *hf_families.MIXTURES])
def test_spelling_of_transformers_5_gets_the_older_one_beside_it(tmp_path, name, tiny_tokenizer, caplog):
    """vLLM and llama.cpp's converter of before December 2025 read these keys too, and no others."""
    source, target = tmp_path / "source", tmp_path / "target"
    theirs = hf_families.family_model(name, source, spelling=5).config
    before, model = json.loads((source / "config.json").read_text()), hf_families.family_run(source).model
    described = model_description(model, source, tiny_tokenizer(), torch.float32)
    added = {key: described[key] for key in described.keys() - before.keys()}
    rope = {}
    if scaling := dict(getattr(theirs, "rope_parameters", {})):
        if local := scaling.get("sliding_attention"):
            scaling = dict(scaling["full_attention"])
            rope = {"rope_local_base_freq": local["rope_theta"]} if name == "gemma-3" else {}
        theta, share = scaling.pop("rope_theta"), scaling.pop("partial_rotary_factor", None)
        rope |= {"rope_theta": theta, "rope_scaling": None if scaling["rope_type"] == "default" else scaling}
        rope |= {} if share is None else {"partial_rotary_factor": share}
    number = {"num_experts": 8} if name == "qwen-3-moe" else {}
    assert added == {**rope, "torch_dtype": "float32", **number}
    assert {key: described[key] for key in before} == before
    target.mkdir()
    logging.getLogger("transformers").addHandler(caplog.handler)
    with warnings.catch_warnings(action="error"):
        again = AutoConfig.from_pretrained(_write_json(target, "config.json", described))
    logging.getLogger("transformers").removeHandler(caplog.handler)
    assert caplog.text == ""
    kept = {"partial_rotary_factor"} if theirs.model_type == "phi3" else set()  # its class keeps both
    expected = theirs.to_dict() | {key: described[key] for key in kept}
    assert again.to_dict() == {**expected, "_name_or_path": str(target)}


@pytest.mark.parametrize("spelling", ["source", "old_source"])
def test_source_stays_byte_for_byte_and_else_only_the_changed_keys_change(
    request, spelling, tmp_path, tiny_tokenizer
):
    path = request.getfixturevalue(spelling) / "config.json"
    text = path.read_text().replace("{", '{\n  "note": "\u00e9\u4e2d",', 1).replace("\n", "\r\n")
    path.write_bytes(text.replace('"float32"', '"bfloat16"').encode())
    before, written = json.loads(path.read_bytes()), tmp_path / "target" / "config.json"
    written.parent.mkdir()
    write_config(written.parent, small_run().model, path.parent, torch.bfloat16)
    assert spelling == "source" or written.read_bytes() == path.read_bytes()
    write_config(written.parent, small_run(norm_epsilon=1e-6).model, path.parent, torch.float16)
    after = json.loads(written.read_bytes())
    dtypes = {"dtype", "torch_dtype"} & after.keys()
    assert {key for key in before if before[key] != after[key]} | dtypes == {"rms_norm_eps"} | dtypes
    assert after["rms_norm_eps"] == 1e-6 and {after[key] for key in dtypes} == {"float16"}
    assert list(after)[: len(before)] == list(before)


NAMED = [("bfloat16", None, "bfloat16"), ("float16", None, "float16"), (None, None, "float32")]


@pytest.mark.parametrize(("named", "flag", "expected"), [*NAMED, ("float32", torch.bfloat16, "bfloat16")])
def test_type_of_mixed_weights_is_the_one_named_or_rounds_none(tmp_path, named, flag, expected):
    """The embedding is the first tensor; norms are in float32."""
    hf_llama(small_run(), tmp_path / "hf")
    weights, path = load_file(tmp_path / "hf/model.safetensors"), tmp_path / "hf/config.json"
    mixed = {name: each if "norm" in name else each.bfloat16() for name, each in weights.items()}
    save_file(mixed, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    _write_json(path.parent, "config.json", {**json.loads(path.read_text()), "dtype": named})
    hf_to_mcore(tmp_path / "hf", tmp_path / "mcore", flag)
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    assert json.loads((tmp_path / "back/config.json").read_text())["dtype"] == expected


YARN = {"rope_scaling_type": "yarn", "rope_original_max_position": 64}
SCALINGS = [
    ({"use_rope_scaling": False}, {"rope_type": "default"}),
    ({"rope_scaling_factor": 32.0}, {"rope_type": "llama3", "factor": 32.0}),
    ({"rope_scaling_type": "linear"}, {"rope_type": "linear", "factor": 8.0}),
    ({"rope_scaling_type": "dynamic"}, {"rope_type": "dynamic", "factor": 8.0}),
    (YARN, {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}),
    ({**YARN, "yarn_attention_factor": 0.9}, {"rope_type": "yarn", "attention_factor": 0.9}),
    (
        {**YARN, "yarn_beta_fast": 9.0, "yarn_correction_range_round_to_int": False},
        {"beta_fast": 9.0, "truncate": False},
    ),
]


@pytest.mark.parametrize(("changes", "expected"), SCALINGS)
@pytest.mark.parametrize("spelling", ["source", "old_source", None])
def test_every_scaling_of_rope_is_exported(request, tmp_path, spelling, changes, expected, tiny_tokenizer):
    """Without a source, and in every spelling of one with llama3's; read by transformers and by us."""
    model = small_run(**changes).model
    folder = request.getfixturevalue(spelling) if spelling else None
    described = model_description(model, folder, tiny_tokenizer(), torch.float32)
    assert ("rope_parameters" in described) == (spelling == "source")
    for unread in ([], ["rope_parameters"], ["rope_scaling", "rope_theta"]):
        read = {key: value for key, value in described.items() if key not in unread}
        if "rope_parameters" in read or "rope_theta" in read:
            _write_json(tmp_path, "config.json", read)
            theirs = LlamaConfig.from_pretrained(tmp_path).rope_parameters
            assert theirs.items() >= {**expected, "rope_theta": model.rotary_base}.items()
    _write_json(tmp_path, "config.json", described)
    ours = read_hf_config(tmp_path)
    assert ours == {name: getattr(model, name) for name in ours} and set(changes) <= set(ours)


@pytest.mark.parametrize(
    ("eos", "chat", "expected"),
    [
        (1, CHAT, [1, 2]),
        ([1, 5], CHAT, [1, 5, 2]),
        ([1, 2], CHAT, [1, 2]),
        (None, CHAT, 2),
        (1, EOS_CHAT, 1),  # as Mistral's
        (5, EOS_CHAT, [5, 1]),
        (1, "{{ messages[0]['content'] }}", 1),  # ends an answer with no token of its own
    ],
)
def test_generation_ends_with_the_chat_templates_turn(tmp_path, eos, chat, expected, tiny_tokenizer):
    contents = {"temperature": 0.6, "eos_token_id": eos}
    _write_json(tmp_path, "generation_config.json", contents)
    described = generation_description(tmp_path, tiny_tokenizer(chat))
    assert described == {"temperature": 0.6, "eos_token_id": expected}


def test_generation_without_a_source_comes_from_the_tokenizer(tiny_tokenizer):
    assert generation_description(None, tiny_tokenizer()) == {"bos_token_id": 0, "eos_token_id": 1}
    assert generation_description(None, tiny_tokenizer(CHAT)) == {"bos_token_id": 0, "eos_token_id": [1, 2]}


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"[" * 100_000, r"cannot read .*generation_config\.json: its values are nested"),
        (b"[]", r"generation_config\.json holds a JSON list"),
    ],
)
def test_broken_file_of_the_source_is_named(source, tiny_tokenizer, contents, message):
    (source / "generation_config.json").write_bytes(contents)
    with pytest.raises(ConversionError, match=message):
        generation_description(source, tiny_tokenizer())


def test_tokenizer_is_saved_under_a_class_that_transformers_4_knows(tmp_path, tiny_tokenizer):
    tokenizer = tiny_tokenizer(CHAT)
    write_descriptions(tmp_path, small_run().model, None, tokenizer, torch.float32)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == (
        "PreTrainedTokenizerFast"
    )
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.chat_template == CHAT and loaded.eos_token == tokenizer.eos_token
    again = tmp_path / "again"
    again.mkdir()
    write_descriptions(again, small_run().model, None, loaded, torch.float32)
    before, after = (json.loads((at / "tokenizer_config.json").read_text()) for at in (tmp_path, again))
    assert before == after and not any("local" in key for key in after)


def test_a_converted_folder_gets_nothing_that_a_link_points_at_elsewhere(source, tmp_path):
    (tmp_path / "secret").write_text("hush")
    for name in ("tokenizer_config.json", "additional_chat_templates/tool.jinja"):
        link = source / name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(tmp_path / "secret")
        with pytest.raises(ConversionError, match=f"{link.name}.*a link to a file outside of .*cp -L"):
            hf_to_mcore(source, tmp_path / "mcore")
        assert not (tmp_path / "mcore").exists()
        link.unlink()
    (source / "tokenizer_config.json").symlink_to(source / "config.json")
    hf_to_mcore(source, tmp_path / "mcore")
    assert (tmp_path / "mcore/tokenizer_config.json").read_bytes() == (source / "config.json").read_bytes()


def test_a_url_is_no_folder_and_its_secrets_are_not_told(tmp_path):
    url = "https://host/model?token=hush"
    with pytest.raises(ConfigError, match=r"got a URL \(https://\.\.\.\), expected a path"):
        hf_to_mcore(url, tmp_path / "mcore")
    shown = str(PatchError(f"{url} is not there, {url.replace('//', '/')} neither"))
    assert "hush" not in shown and "is not there" in shown and url.partition("://")[0] in shown
