"""What a checkpoint says about its model, and where its config.json and that of the folder disagree."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_families import family_model

from patch.alignment.stored import find_checkpoint
from patch.convert import hf_to_mcore
from patch.errors import CheckpointError, ConfigError


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied and an untied folder, each with the checkpoint that was converted from it."""
    root = tmp_path_factory.mktemp("stored")
    for name, dtype in (("llama-3.2", torch.bfloat16), ("llama-3", None)):
        family_model(name, root / name)
        hf_to_mcore(root / name, root / f"{name}-mcore", dtype)
    return root


def _describe(checkpoint: Path, **changes: Any) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_shape_type_and_tying_are_those_that_are_stored(root: Path) -> None:
    tied = find_checkpoint(root / "llama-3.2-mcore", root / "llama-3.2")
    untied = find_checkpoint(root / "llama-3-mcore" / "release", root / "llama-3")
    assert (tied.folder, untied.folder) == (root / "llama-3.2-mcore/release", root / "llama-3-mcore/release")
    assert (tied.precision, untied.precision) == ("bf16", "fp32")
    assert (tied.is_hf_tied, untied.is_hf_tied) == (True, False)
    assert not tied.model.untie_embeddings_and_output_weights
    assert untied.model.untie_embeddings_and_output_weights
    shape = family_model("llama-3").config
    assert (tied.model.num_layers, tied.model.hidden_size) == (shape.num_hidden_layers, shape.hidden_size)
    assert tied.model.padded_vocab_size(1) == 256  # as it is stored: 250 rows in a multiple of 128
    assert tied.config_differences == untied.config_differences == []


def test_fields_that_change_what_is_computed_are_told(root: Path, tmp_path: Path) -> None:
    hf_to_mcore(root / "llama-3", tmp_path / "mcore")
    _describe(tmp_path / "mcore", rope_theta=10000.0, max_position_embeddings=64)
    stored = find_checkpoint(tmp_path / "mcore", root / "llama-3")
    assert [tuple(found) for found in stored.config_differences] == [("rotary_base", 10000.0, 500000.0)]


def test_another_shape_is_refused(root: Path, tmp_path: Path) -> None:
    hf_to_mcore(root / "llama-3", tmp_path / "mcore")
    _describe(tmp_path / "mcore", intermediate_size=128)
    with pytest.raises(CheckpointError, match=r"ffn_hidden_size: 128 in .*, 96 in .*: not the same model"):
        find_checkpoint(tmp_path / "mcore", root / "llama-3")


def test_folders_of_another_kind_are_refused(root: Path, tmp_path: Path) -> None:
    for checkpoint, folder, words in (
        (root / "llama-3-mcore", tmp_path, "no config.json there"),
        (root / "llama-3", root / "llama-3", "a Hugging Face folder, expected what llama-patch convert made"),
        (tmp_path, root / "llama-3", "no checkpoint there"),
    ):
        with pytest.raises(ConfigError, match=words):
            find_checkpoint(checkpoint, folder)
