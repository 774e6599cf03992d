"""The converter's command line: exit codes, what bad input leaves behind, interruptions, memory."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from distributed_runner import run_distributed
from hf_families import family_model
from safetensors.torch import load_file, save_file

from toolkits.convert import main

pytestmark = pytest.mark.long

NAME = "model.layers.0.mlp.gate_proj.weight"


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A folder in several files, and what hf2mcore makes of it."""
    root = tmp_path_factory.mktemp("good")
    family_model("llama-3", root / "hf", max_shard_size="60KB")
    assert main(["hf2mcore", "--load", str(root / "hf"), "--save", str(root / "mcore")]) == 0
    return root


@pytest.fixture
def root(good, tmp_path) -> Path:
    """A copy to spoil, and a target of each kind that must stay as it is."""
    shutil.copytree(good, tmp_path / "copy")
    shutil.copytree(good, tmp_path / "copy" / "before")
    return tmp_path / "copy"


def _snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _file_of(root: Path, name: str = NAME) -> Path:
    index = json.loads((root / "hf" / "model.safetensors.index.json").read_text())
    return root / "hf" / index["weight_map"][name]


def _change(root: Path, change) -> None:
    path = _file_of(root)
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_values_that_float16_cannot_hold_are_refused_by_name(root, capsys):
    _change(root, lambda tensors: tensors[NAME].view(-1)[5].fill_(65504.0))
    argv = ["hf2mcore", "--load", str(root / "hf"), "--save", str(root / "m"), "--params-dtype", "fp16"]
    assert main([*argv, "--overwrite"]) == 0
    _change(root, lambda tensors: tensors[NAME].view(-1)[5].fill_(-1e5))
    assert main([*argv, "--overwrite"]) == 4
    message = capsys.readouterr().err
    assert NAME in message and "65504" in message and "--params-dtype" in message
    assert main([*argv[:-2], "--overwrite"]) == 0


def test_every_file_of_the_tokenizer_goes_there_and_back(root):
    (root / "hf" / "additional_chat_templates").mkdir()
    for name in ("tokenizer.json", "tokenizer.model.v3", "additional_chat_templates/tool_use.jinja"):
        (root / "hf" / name).write_text(name)
    assert main(["hf2mcore", "--load", str(root / "hf"), "--save", str(root / "m")]) == 0
    assert main(["mcore2hf", "--load", str(root / "m"), "--save", str(root / "back")]) == 0
    assert _snapshot(root / "back") == _snapshot(root / "hf")


def test_single_file_beside_an_index_comes_back_alone(root):
    """The single file is the one that is read, as transformers does."""
    tensors = {}
    for path in (root / "hf").glob("*.safetensors"):
        tensors |= load_file(path)
    save_file(tensors, root / "hf" / "model.safetensors", metadata={"format": "pt"})
    assert main(["hf2mcore", "--load", str(root / "hf"), "--save", str(root / "m")]) == 0
    assert main(["mcore2hf", "--load", str(root / "m"), "--save", str(root / "back")]) == 0
    (file,) = (root / "back").glob("*.safetensors*")
    assert file.read_bytes() == (root / "hf" / "model.safetensors").read_bytes()


def _data(root: Path) -> Path:
    return root / "mcore" / "release" / "__0_0.distcp"


def _exchange(root: Path, old: bytes, new: bytes) -> None:
    _data(root).write_bytes(_data(root).read_bytes().replace(old, new, 1))


def _without_checksums(root: Path) -> Path:
    (root / "mcore" / "release" / "checksums.json").unlink()
    return root


def _other_model(root: Path) -> None:
    path = root / "mcore" / "config.json"
    path.write_text(path.read_text().replace('"intermediate_size": 96', '"intermediate_size": 128'))


def _change_index(root: Path, change) -> None:
    path = root / "mcore" / "release" / ".metadata"
    index = pickle.loads(path.read_bytes())
    change(index)
    path.write_bytes(pickle.dumps(index))


FC2 = "decoder.layers.mlp.linear_fc2.weight"


END = b"PK\x05\x06"
"""How the directory at the end of a record begins."""
SPOILED: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "hf lacks a key": (
        lambda root: _change(root, lambda tensors: tensors.pop(NAME)), [f"no tensor {NAME}"],
    ),
    "hf is converted already": (
        lambda root: (shutil.rmtree(root / "hf"), (root / "mcore").rename(root / "hf")),
        ["hf is a converted checkpoint", "mcore2hf"],
    ),
    # Without checksums, as of another program: what is wrong is found while it is read.
    "mcore lacks a key": (
        lambda root: _change_index(_without_checksums(root), lambda read: read.state_dict_metadata.pop(FC2)),
        ["release lacks decoder.layers.*.mlp.linear_fc2.weight of layer 0"],
    ),
    "mcore has a broken record": (
        lambda root: _exchange(_without_checksums(root), END, b"PK\0\0"),
        ["__0_0.distcp: embedding.word_embeddings.weight (bytes 0 to"],
    ),
    "mcore has other bytes": (
        lambda root: _exchange(root, END, b"PK\0\0"), ["__0_0.distcp ", "convert the model again"],
    ),
    "mcore has no config": (lambda root: (root / "mcore" / "config.json").unlink(), ["--hf-config"]),
    "mcore has another shape": (
        _other_model, ["mlp.linear_fc1.weight has shape (2, 192, 64)", "expected (2, 256, 64)"],
    ),
    "mcore is not there": (lambda root: shutil.rmtree(root / "mcore"), ["mcore: no such folder"]),
}  # fmt: skip


@pytest.mark.parametrize("case", SPOILED)
def test_spoiled_source_ends_with_4_and_leaves_the_target(root, case, capsys):
    """A message with all parts, nothing on stdout, and the targets as they were."""
    spoil, parts = SPOILED[case]
    source, target = ("hf", "mcore") if case.startswith("hf") else ("mcore", "hf")
    spoil(root)
    before = _snapshot(root / "before")
    argv = ["--load", str(root / source), "--save", str(root / "before" / target), "--overwrite"]
    assert main([f"{source}2{target}", *argv]) == 4
    output, message = capsys.readouterr()
    assert all(part in message for part in parts) and not output, message
    assert _snapshot(root / "before") == before and len(list((root / "before").iterdir())) == 2


def test_conversions_do_without_the_import_of_transformers(root):
    script = (
        "import sys\nfrom toolkits.convert import main\n"
        "assert not main(['hf2mcore', '--load', 'hf', '--save', 'new'])\n"
        "assert not main(['mcore2hf', '--load', 'new', '--save', 'back'])\n"
        "print(*({'transformers', 'tokenizers', 'torch._dynamo'} & sys.modules.keys()))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def _in_64_bits(index) -> None:
    for stored in index.state_dict_metadata.values():
        if hasattr(stored, "properties"):
            stored.properties.dtype = torch.float64


def test_weights_of_a_type_that_hugging_face_folders_lack_are_refused(root, capsys):
    (root / "mcore" / "release" / "checksums.json").unlink()
    _change_index(root, _in_64_bits)
    assert main(["mcore2hf", "--load", str(root / "mcore"), "--save", str(root / "new")]) == 4
    assert "model.embed_tokens.weight as torch.float64, expected one of" in capsys.readouterr().err


def test_folder_of_another_kind_is_never_replaced(root, capsys):
    assert main(["hf2mcore", "--load", str(root / "hf"), "--save", str(root / "before" / "hf")]) == 4
    assert "no converted checkpoint" in capsys.readouterr().err
    assert main(["mcore2hf", "--load", str(root / "mcore"), "--save", str(root / "before" / "mcore")]) == 4
    assert "no Hugging Face model" in capsys.readouterr().err


def test_params_dtype_rounds_and_config_says_so(root, capfd):
    argv = ["hf2mcore", "--load", str(root / "hf"), "--save", str(root / "n"), "--params-dtype", "bf16"]
    assert main(argv) == 0
    assert "hf are rounded to bfloat16 (--params-dtype)" in capfd.readouterr().err
    assert main(["mcore2hf", "--load", str(root / "n"), "--save", str(root / "back")]) == 0
    before, after = ((root / folder / "config.json").read_text() for folder in ("hf", "back"))
    assert after == before.replace("float32", "bfloat16")
    expected = load_file(_file_of(root))[NAME].bfloat16()
    stored = load_file(root / "back" / _file_of(root).name)[NAME]
    assert stored.dtype == torch.bfloat16 and torch.equal(stored, expected)
    index = json.loads((root / "back" / "model.safetensors.index.json").read_text())
    original = json.loads((root / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] * 2 == original["metadata"]["total_size"]
    assert index["weight_map"] == original["weight_map"]


def _killed(rank: int, world_size: int, argv: list[str]) -> None:
    """A conversion that is killed in the middle of its weights."""
    from patch.convert.safetensors_writer import SafetensorsWriter

    write, count = SafetensorsWriter.write, 0

    def write_until_killed(*arguments):
        nonlocal count
        count += 1
        if count == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        write(*arguments)

    SafetensorsWriter.write = write_until_killed
    main(argv)


def test_killed_conversion_is_not_taken_for_done_and_starts_over(root, capfd):
    argv = ["mcore2hf", "--load", str(root / "mcore"), "--save", str(root / "new")]
    with pytest.raises(AssertionError, match="died with -9"):
        run_distributed(_killed, 1, argv)
    assert not (root / "new").exists() and (root / ".new.partial").is_dir()
    assert main(argv) == 0
    assert "left by a process that was stopped while it wrote there" in capfd.readouterr().err
    assert _snapshot(root / "new") == _snapshot(root / "hf")
    assert not list(root.glob(".*"))


LAYERS = 16


def _peak_mib(rank: int, world_size: int, folder: Path) -> float:
    """Highest resident memory of a process that converted the folder both ways."""
    assert main(["hf2mcore", "--load", str(folder), "--save", f"{folder}-mcore"]) == 0
    assert main(["mcore2hf", "--load", f"{folder}-mcore", "--save", f"{folder}-back"]) == 0
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line]
    return int(line.split()[1]) / 1024


def _write_model(folder: Path, num_layers: int) -> None:
    """One file of 12 MiB a layer."""
    from patch.convert.hf_config_files import model_of
    from patch.families.adapters import hf_tensors

    folder.mkdir()
    shape = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "vocab_size": 500}
    values = {"model_type": "llama", "num_hidden_layers": num_layers, **shape}
    (folder / "config.json").write_text(json.dumps(values))
    tensors = {tensor.name: torch.randn(tensor.shape) for tensor in hf_tensors(model_of(folder))}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_memory_does_not_grow_with_the_model(tmp_path):
    peaks = []
    for num_layers in (LAYERS // 4, LAYERS):
        _write_model(tmp_path / str(num_layers), num_layers)
        peaks += run_distributed(_peak_mib, 1, tmp_path / str(num_layers))
    more = ((tmp_path / str(LAYERS)) / "model.safetensors").stat().st_size / 2**20 * 3 / 4
    assert more > 140 and peaks[1] - peaks[0] < more / 8, f"MiB: {peaks}, the model grew by {more}"


WRAPPER = (
    Path(__file__).parents[3] / "toolkits/model_checkpoints_convertor/llama/hf2mcore_convertor_llama3_1.sh"
)


def _wrapper(*positions: str) -> subprocess.CompletedProcess:
    command = ["sh", str(WRAPPER), *positions]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHON": sys.executable}
    )


def test_positions_of_pais_converter(root):
    back = _wrapper(
        "8B", str(root / "mcore"), str(root / "b"), *"2 2 true false false fp32".split(), str(root / "hf")
    )
    assert back.returncode == 0 and "SIZE, TP and PP are not needed" in back.stderr, back.stderr
    assert (root / "b" / _file_of(root).name).read_bytes() == _file_of(root).read_bytes()


@pytest.mark.parametrize(
    ("positions", "message"),
    [("8B a b", "SIZE SOURCE TARGET"), ("8B a b 1 1 yes false false bf16", "got yes"),
     ("8B a b 1 1 true false false bf16", "HF_CKPT_PATH"),
     ("8B a nowhere 1 1 true false true fp32 c", "nowhere: no config.json there")],
)  # fmt: skip
def test_wrong_positions_of_pais_converter_end_with_2(positions, message):
    """The last one looks, with CHECK_ONLY, at what was converted back."""
    ended = _wrapper(*positions.split())
    assert ended.returncode == 2 and message in ended.stderr
