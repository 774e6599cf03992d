"""A family that the project does not have, added by another program: Arcee, whose MLP has no gate."""

import dataclasses
import json
import runpy
from pathlib import Path

import pytest
import torch
from hf_families import family_model, family_run
from small_runs import small_run
from transformers import AutoConfig

from patch.convert.hf_config_files import model_description
from patch.errors import ConfigError
from patch.families import FAMILIES, PRESETS, family_of, register_family, traits_of
from patch.families.weights import dense_rows
from patch.plan.flops import flops_per_step
from patch.plan.parameters import parameters_per_rank, total_parameters

PROGRAM = Path(__file__).parents[3] / "examples/llama3_1/library/arcee.py"


@pytest.fixture(autouse=True)
def arcee():
    yield runpy.run_path(str(PROGRAM))["ARCEE"]
    del FAMILIES["arcee"]


def test_its_models_are_read_counted_and_written_as_transformers_has_them(tmp_path, tiny_tokenizer, arcee):
    theirs = family_model("arcee", tmp_path)
    model = family_run(tmp_path).model
    assert traits_of(model) == arcee.traits and family_of(model) is arcee
    assert total_parameters(model) == theirs.num_parameters()
    described = model_description(model, None, tiny_tokenizer(), torch.float32)
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert family_run(tmp_path).model == model
    again = AutoConfig.from_pretrained(tmp_path).to_dict()
    of_tokenizer = {"bos_token_id": 0, "eos_token_id": 1, "_name_or_path": str(tmp_path)}
    assert again == theirs.config.to_dict() | of_tokenizer


def test_flag_that_its_class_has_not_leaves_its_layers_but_no_class(tmp_path):
    family_model("arcee", tmp_path)
    model = family_run(tmp_path, add_qkv_bias=True).model
    assert family_of(model) is None and not traits_of(model).gated_linear_unit
    with pytest.raises(ConfigError, match="got 'gpt2', expected auto or one of llama, .*arcee"):
        family_run(tmp_path, model_type="gpt2")


def test_share_in_use_decides_flops_and_active_parameters_but_not_what_is_held(arcee):
    dense = small_run(model_type="arcee")

    def rows(model, traits):
        return tuple(r._replace(active=0.25 if r.part == "mlp" else 1) for r in dense_rows(model, traits))

    before, held = flops_per_step(dense).model, parameters_per_rank(dense)
    register_family(dataclasses.replace(arcee, rows=rows))
    unused = 0.75 * 4 * 2 * 64 * 160
    assert total_parameters(dense.model, active=True) == total_parameters(dense.model) - unused
    assert before - flops_per_step(dense).model == 3 * 2 * unused * 4 * 32
    assert parameters_per_rank(dense) == held


def test_its_public_sizes_are_words_of_position_2(command, arcee):
    small = {"num_layers": 1, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4}
    small |= {"vocab_size": 300, "max_position_embeddings": 4096, "rotary_base": 1e4}
    register_family(dataclasses.replace(arcee, presets={"afm-small": small}))
    model = command.parse(MODEL_SIZE="afm-small").config.model
    assert (model.model_type, model.ffn_hidden_size) == ("arcee", 96)
    del PRESETS["afm-small"]
    with pytest.raises(ConfigError, match="position 2 MODEL_SIZE: got 'afm-small', expected one of tiny, "):
        command.parse(MODEL_SIZE="afm-small")
