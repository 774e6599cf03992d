"""Folders that cannot be read, or do not fit, are refused by tensor, file and shapes."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_runs import hf_llama, small_run

from patch.convert import hf_reader, hf_to_mcore
from patch.convert.hf_reader import HFFolder
from patch.errors import ConversionError
from patch.families.adapters import hf_tensors
from patch.families.weights import OUTPUT

QKV = "model.layers.3.self_attn.k_proj.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


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
    HFFolder(folder).check(hf_tensors((config or small_run()).model), unused=unused)


def _renamed(tensors):
    tensors[QKV + "s"] = tensors.pop(QKV)


def _with(name, make):
    return lambda folder: _change(folder, GATE, lambda tensors: tensors.update({name: make(tensors)}))


def _cut(keep):
    return lambda folder: _rewritten(folder, lambda contents: contents[:keep])


def _rewritten(folder, change):
    path = _file_of(folder, GATE)
    path.write_bytes(change(path.read_bytes()))
    return path


BIAS = "model.layers.0.self_attn.q_proj.bias"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
MISFITS = {
    "missing shard": (lambda folder: _file_of(folder, GATE).unlink(), {}, r"is missing.* places model\."),
    "empty": (_cut(0), {}, r"{file} \(0 bytes\) cannot be read"),
    "truncated": (_cut(-1), {}, r"{file} \(\d+ bytes\) cannot be read"),
    "git-lfs": (
        lambda folder: _rewritten(folder, lambda _: POINTER), {},
        "{file} is a pointer of git-lfs: run git lfs pull",
    ),
    "missing tensor": (
        lambda folder: _change(folder, QKV, _renamed), {},
        rf"no tensor {QKV} of shape \(32, 64\).*did you mean {QKV}s\?",
    ),
    "unexpected": (_with(BIAS, lambda _: torch.zeros(64)), {}, rf"{{file}} holds {BIAS} \(shape \(64,\)\)"),
    "more layers": (
        lambda folder: None, {"num_layers": 3},
        r"holds model\.layers\.3\..*no place for \(9 such tensors\)",
    ),
    "shape": (
        lambda folder: None, {"num_query_groups": 4},
        r"k_proj.weight.*\.safetensors.*\(32, 64\).*\(64, 64\)",
    ),
    "quantised": (
        _with(GATE, lambda tensors: tensors[GATE].to(torch.float8_e4m3fn)), {},
        rf"{GATE} .*stored as F8_E4M3",
    ),
}  # fmt: skip
"""What is done to a folder, what is expected of its model, what is said."""


@pytest.mark.parametrize("misfit", MISFITS)
def test_folder_that_does_not_fit_is_refused_by_tensor_file_and_shapes(folder, misfit):
    spoil, changes, said = MISFITS[misfit]
    name = _file_of(folder, GATE).name
    spoil(folder)
    with pytest.raises(ConversionError, match=said.replace("{file}", name)):
        _check(folder, small_run(**changes))


def test_value_that_is_not_finite_is_named_with_its_file(folder, tmp_path):
    path = _change(folder, GATE, lambda tensors: tensors[GATE][-1, 3].fill_(-math.inf))
    with pytest.raises(ConversionError, match=f"{GATE} in {path} has values that are NaN or infinite"):
        hf_to_mcore(folder, tmp_path / "mcore")


def test_stored_rope_frequencies_are_ignored(folder):
    _with("model.layers.0.self_attn.rotary_emb.inv_freq", lambda _: torch.zeros(8))(folder)
    _check(folder)


def test_output_layer_in_a_tied_folder_is_unused_not_unexpected(folder):
    tied = small_run(untie_embeddings_and_output_weights=False)
    _check(folder, tied, unused=frozenset({OUTPUT}))
    with pytest.raises(ConversionError, match=OUTPUT):
        _check(folder, tied)


def test_tied_output_layer_must_be_a_copy(folder):
    with pytest.raises(ConversionError, match=f"{OUTPUT} .* differs from {EMBEDDING}"):
        HFFolder(folder).check_copy(OUTPUT, EMBEDDING)
    embedding = load_file(_file_of(folder, EMBEDDING))[EMBEDDING]
    _change(folder, OUTPUT, lambda tensors: tensors.update({OUTPUT: embedding}))
    source = HFFolder(folder)
    source.check_copy(OUTPUT, EMBEDDING)
    source.check_copy("absent", EMBEDDING)


@pytest.mark.parametrize(
    ("dtype", "rows", "message"),
    [
        (torch.float8_e4m3fn, 250, "stored as F8_E4M3"),
        (torch.float32, 251, r"\(251, 64\), the model expects"),
    ],
)
def test_tied_output_layer_of_another_type_or_shape_is_refused(folder, monkeypatch, dtype, rows, message):
    monkeypatch.setattr(hf_reader, "_ROWS", 125)
    embedding = load_file(_file_of(folder, EMBEDDING))[EMBEDDING]
    output = torch.cat([embedding, torch.zeros(rows - 250, 64)]).to(dtype)
    _change(folder, OUTPUT, lambda tensors: tensors.update({OUTPUT: output}))
    with pytest.raises(ConversionError, match=f"{OUTPUT} in .*{message}"):
        HFFolder(folder).check_copy(OUTPUT, EMBEDDING)


@pytest.mark.parametrize(
    "index", ["[", "[" * 100_000, "{}", "[]", '{"weight_map": {"a": "../b.safetensors"}}']
)
def test_broken_index_is_refused(folder, index):
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConversionError, match="no index of weights|outside of its folder"):
        _check(folder)


def test_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(ConversionError, match=r"neither model\.safetensors nor .* pytorch_model\.bin"):
        _check(tmp_path)


@pytest.fixture
def bin_folder(tmp_path):
    """What transformers 4 wrote before safetensors: two torch.save files and their index."""
    tensors = hf_llama(small_run()).state_dict()
    names = list(tensors)
    placed = {name: f"pytorch_model-0000{1 + (i > 9)}-of-00002.bin" for i, name in enumerate(names)}
    for file in set(placed.values()):
        torch.save({name: tensors[name] for name in names if placed[name] == file}, tmp_path / file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": placed}))
    return tmp_path


def test_bin_files_are_read(bin_folder):
    _check(bin_folder)
    expected = hf_llama(small_run()).state_dict()[GATE]
    source = HFFolder(bin_folder)
    assert torch.equal(source[GATE][3:5], expected[3:5]) and source.dtype_of(GATE) == torch.float32


class _Hostile:
    def __reduce__(self):
        return print, ("code of the file ran",)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"a": _Hostile()}, "holds more than tensors and was not read"),
        ({"a": 1}, "no dict of tensors, expected name -> tensor"),
        (None, "cannot be read as a torch.save file"),
    ],
)
def test_bin_file_that_holds_no_plain_tensors_is_refused(bin_folder, contents, message, capsys):
    path = bin_folder / "pytorch_model-00002-of-00002.bin"
    if contents is None:
        path.write_bytes(path.read_bytes()[:5000])
    else:
        torch.save(contents, path)
    with pytest.raises(ConversionError, match=f"{path.name} .*{message}"):
        _check(bin_folder)
    assert not capsys.readouterr().out

