"""Folders that cannot be read, or do not fit, are refused by tensor, file and shapes."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_runs import hf_llama, small_run

from patch.convert.hf_reader import HFFolder
from patch.convert.table import EMBEDDING, OUTPUT, hf_tensors
from patch.errors import ConversionError

QKV = "model.layers.3.self_attn.k_proj.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    path = tmp_path_factory.mktemp("hf")
    hf_llama(small_run()).save_pretrained(path, max_shard_size="100KB")
    return path


@pytest.fixture
def folder(sharded, tmp_path):
    return shutil.copytree(sharded, tmp_path / "copy")


def _file_of(folder, name):
    return folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]


def _change(folder, name, change):
    path = _file_of(folder, name)
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def _check(folder, config=None, unused=frozenset()):
    with HFFolder(folder) as source:
        source.check(hf_tensors((config or small_run()).model), unused=unused)


def test_sharded_folder_that_fits_is_accepted_and_read(folder):
    _check(folder)
    with HFFolder(folder) as source:
        assert torch.equal(source[GATE][3:5], load_file(_file_of(folder, GATE))[GATE][3:5])


def test_missing_shard_is_named(folder):
    path = _file_of(folder, GATE)
    path.unlink()
    with pytest.raises(ConversionError, match=rf"{path.name} is missing.* places model\."):
        _check(folder)


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_truncated_shard_is_named_with_its_size(folder, keep):
    path = _file_of(folder, GATE)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ConversionError, match=rf"{path.name} \({path.stat().st_size} bytes\) cannot be read"):
        _check(folder)


def test_missing_tensor_is_named_with_the_nearest_one(folder):
    _change(folder, QKV, lambda tensors: tensors.update({QKV + "s": tensors.pop(QKV)}))
    with pytest.raises(ConversionError, match=rf"no tensor {QKV} of shape \(32, 64\).*did you mean {QKV}s\?"):
        _check(folder)


def test_unexpected_tensor_is_named_with_its_file(folder):
    name = "model.layers.0.self_attn.q_proj.bias"
    path = _change(folder, GATE, lambda tensors: tensors.update({name: torch.zeros(64)}))
    with pytest.raises(ConversionError, match=rf"{path.name} holds {name} \(shape \(64,\)\)"):
        _check(folder)


def test_more_layers_than_configured_are_unexpected(folder):
    with pytest.raises(ConversionError, match=r"holds model\.layers\.3\..*no place for \(9 such tensors\)"):
        _check(folder, small_run(num_layers=3))


def test_stored_rope_frequencies_are_ignored(folder):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    _change(folder, GATE, lambda tensors: tensors.update({name: torch.zeros(8)}))
    _check(folder)


def test_wrong_shape_names_tensor_file_and_both_shapes(folder):
    with pytest.raises(ConversionError) as caught:
        _check(folder, small_run(num_query_groups=4))
    for part in ("k_proj.weight", ".safetensors", "(32, 64)", "(64, 64)"):
        assert part in str(caught.value)


def test_quantised_tensor_is_refused_by_type(folder):
    _change(folder, GATE, lambda tensors: tensors.update({GATE: tensors[GATE].to(torch.float8_e4m3fn)}))
    with pytest.raises(ConversionError, match=rf"{GATE} .*stored as F8_E4M3"):
        _check(folder)


def test_output_layer_in_a_tied_folder_is_unused_not_unexpected(folder):
    tied = small_run(untie_embeddings_and_output_weights=False)
    _check(folder, tied, unused=frozenset({OUTPUT}))
    with pytest.raises(ConversionError, match=OUTPUT):
        _check(folder, tied)


def test_tied_output_layer_must_be_a_copy(folder):
    with (
        HFFolder(folder) as source,
        pytest.raises(ConversionError, match=f"{OUTPUT} .* differs from {EMBEDDING}"),
    ):
        source.check_copy(OUTPUT, EMBEDDING)
    embedding = load_file(_file_of(folder, EMBEDDING))[EMBEDDING]
    _change(folder, OUTPUT, lambda tensors: tensors.update({OUTPUT: embedding}))
    with HFFolder(folder) as source:
        source.check_copy(OUTPUT, EMBEDDING)
        source.check_copy("absent", EMBEDDING)


@pytest.mark.parametrize("index", ["[", "{}", "[]"])
def test_broken_index_is_refused(folder, index):
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConversionError, match="no index of safetensors"):
        _check(folder)


def test_folder_without_safetensors_is_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ConversionError, match=r"neither model\.safetensors nor .*\.bin files are not read"):
        _check(tmp_path)


def test_expected_tensors_are_those_of_transformers():
    found = {name: tuple(tensor.shape) for name, tensor in hf_llama(small_run()).state_dict().items()}
    assert dict(hf_tensors(small_run().model)) == found
