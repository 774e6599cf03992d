"""llama-patch inspect on checkpoints that a test knows, and on harmed and hostile ones."""

import argparse
import json
import math
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from small_runs import small_run
from torch.distributed.checkpoint import FileSystemReader

from patch.checkpoint import save_checkpoint
from patch.compat.checkpoint_format import COMMON_IS_OBJECT
from patch.config import to_yaml
from patch.storage.names import COMMON_KEY
from toolkits.inspect_checkpoint import main

OF_COMMON = [] if COMMON_IS_OBJECT else ["common.pt"]
W, STATE, STEPS = "decoder.w", "optimizer.exp_avg.decoder.w", "embedding.steps"


def values(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        W: torch.randn(12, 8, generator=generator).bfloat16(),
        STATE: torch.randn(12, 8, generator=generator),
        STEPS: torch.arange(5),
    }


def cut(key: str, tensor: torch.Tensor, axis: int, parts: int) -> dict[str, ShardedTensor]:
    """All shards of one tensor, as so many ranks would have them."""
    return {
        f"{key}/{part}": ShardedTensor.from_rank_offsets(key, piece.contiguous(), (axis, part, parts))
        for part, piece in enumerate(tensor.chunk(parts, axis))
    }


def save(root: Path, tensors: dict[str, torch.Tensor], axis: int = 0, parts: int = 3, **common: Any) -> Path:
    sections: dict[str, dict] = {"model": {}, "optimizer": {}}
    for key, tensor in tensors.items():
        section = sections["optimizer" if key.startswith("optimizer") else "model"]
        section |= cut(key, tensor, axis, parts) if tensor.ndim == 2 else cut(key, tensor, 0, 1)
    save_checkpoint(root / "checkpoint", 7, sections, {"iteration": 7, **common})
    return root / "checkpoint" / "iter_0000007"


def inspect(tmp_path: Path, *folders: Path) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON."""
    file = tmp_path / "report.json"
    file.unlink(missing_ok=True)
    code = main([*map(str, folders), "--json", str(file)])
    return code, json.loads(file.read_text()) if file.exists() else {}


def test_names_shapes_types_and_bytes_are_those_that_torch_reads(one_process, tmp_path, capsys):
    folder = save(tmp_path / "run", values())
    for load in (tmp_path / "run", tmp_path / "run" / "checkpoint", folder):
        code, report = inspect(tmp_path, load)
        (found,) = report["checkpoints"]
        assert code == 0 and found["folder"] == str(folder) and found["facts"]["iteration"] == 7
        theirs = FileSystemReader(folder).read_metadata().state_dict_metadata
        assert {each["name"]: (each["shape"], each["dtype"]) for each in found["tensors"]} == {
            name: (list(t.size), str(t.properties.dtype)[6:])
            for name, t in theirs.items()
            if name != COMMON_KEY
        }
        groups = {each["name"]: each["group"] for each in found["tensors"]}
        assert groups == {W: "weights", STEPS: "weights", STATE: "optimizer states"}
        sizes = {each["name"]: each["num_bytes"] for each in found["tensors"]}
        assert sizes == {W: 192, STATE: 384, STEPS: 40}
        assert {file["name"] for file in found["files"]} == {path.name for path in folder.iterdir()}
    said = capsys.readouterr().out
    assert "12 x 8" in said and "bfloat16" in said
    assert re.search(r"checksums: (\d+) of \1 files are what was saved", said)
    (folder / "checksums.json").unlink()  # as of a converted checkpoint
    assert inspect(tmp_path, folder)[0] == 0 and "checksums: it has none" in capsys.readouterr().out


@pytest.mark.parametrize(("axis", "parts"), [(0, 1), (0, 2), (1, 4)])
def test_equal_values_in_any_layout_are_equal(one_process, tmp_path, axis, parts):
    first, second = save(tmp_path / "a", values()), save(tmp_path / "b", values(), axis, parts)
    code, report = inspect(tmp_path, first, second)
    assert code == 0 and report["comparison"]["is_equal"] and report["comparison"]["num_equal"] == 3


def test_differences_are_named_with_their_size(one_process, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("patch.checkpoint.compare._WINDOW_ELEMENTS", 5)
    ours, theirs = values(), values()
    theirs[W] = theirs[W].clone()
    theirs[W][7, 3] += 2.0
    theirs[W][0, 0] -= 0.5
    theirs[STATE] = theirs[STATE].double()[:11].float()
    theirs["embedding.more"] = torch.zeros(2)
    del theirs[STEPS]
    first = save(tmp_path / "a", ours, loss_scale={"value": 2.0})
    second = save(tmp_path / "b", theirs, 1, 2, loss_scale={"value": 4.0})
    code, report = inspect(tmp_path, first, second)
    found = report["comparison"]
    assert code == 1 and not found["is_equal"] and found["num_equal"] == 0
    by_name = {each["name"]: each for each in found["differences"]}
    expected = (ours[W].double() - theirs[W].double()).abs()
    assert by_name[W]["num_different"] == int((expected > 0).sum()) == 2
    assert by_name[W]["largest"] == float(expected.max())
    shapes = [by_name[STATE][side] for side in ("first", "second")]
    assert shapes == [[12, 8], [11, 8]] and by_name[STATE]["num_different"] == 0
    assert found["only_first"] == [STEPS] and found["only_second"] == ["embedding.more"]
    assert found["common_values"] == ["loss_scale"]
    assert "only in the second: embedding.more" in capsys.readouterr().out


def test_other_types_nan_and_signed_zero(one_process, tmp_path):
    ours = {W: torch.zeros(12, 8), STATE: torch.zeros(12, 8), STEPS: torch.arange(5)}
    theirs = {W: torch.zeros(12, 8).bfloat16(), STATE: torch.zeros(12, 8), STEPS: torch.arange(5)}
    theirs[STATE][1, 1], theirs[STATE][2, 2] = -0.0, math.nan
    _, report = inspect(tmp_path, save(tmp_path / "a", ours), save(tmp_path / "b", theirs))
    by_name = {each["name"]: each for each in report["comparison"]["differences"]}
    assert by_name[W]["dtypes"] == ["float32", "bfloat16"] and by_name[W]["num_different"] == 0
    assert by_name[STATE]["num_different"] == 2 and by_name[STATE]["largest"] is None


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", *OF_COMMON, "metadata.json", "checksums.json"])
def test_damaged_file_is_named(one_process, tmp_path, capsys, name):
    """Whatever may happen to a file: tests/unit/checkpoint/test_manifest.py."""
    path = save(tmp_path / "run", values()) / name
    path.write_bytes(path.read_bytes()[:-9])
    code, report = inspect(tmp_path, tmp_path / "run")
    (found,) = report["checkpoints"]
    assert code == 4 and [str(path) in said for said in found["complaints"]] == [True]
    assert f"DAMAGED {path}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "lost", [["checksums.json", ".metadata"], ["checksums.json", *(OF_COMMON or ["metadata.json"])]]
)
@pytest.mark.parametrize("name", ["iter_0000007", "release"])
def test_checkpoint_that_no_load_would_take_is_listed_with_what_is_wrong(one_process, tmp_path, name, lost):
    folder = save(tmp_path / "run", values())
    folder = folder.rename(folder.with_name(name))
    folder.with_name("latest_checkpointed_iteration.txt").write_text(name.removeprefix("iter_"))
    for file in lost:
        (folder / file).unlink()
    for load in (tmp_path / "run", folder):
        code, report = inspect(tmp_path, load)
        (found,) = report["checkpoints"]
        assert code == 4 and found["folder"] == str(folder)
        assert any(lost[1] in said for said in found["complaints"])


def _endless() -> dict[str, Any]:
    """A dict in itself, and one that holds another so often that its text would fill all memory."""
    values: dict[str, Any] = {"number": 1}
    for _ in range(60):
        values = {"one": values, "other": values}
    values["again"] = values
    return values


def test_values_without_end_are_neither_shown_nor_compared_for_ever(one_process, tmp_path):
    folders = []
    for name in ("a", "b"):
        folders.append(save(tmp_path / name, values()))
        (folders[-1] / "checksums.json").unlink()
        torch.save({"iteration": 7, "scale": {"x": 1.0}, "deep": _endless()}, folders[-1] / "common.pt")
    code, report = inspect(tmp_path, *folders)
    assert code == 0 and report["comparison"]["common_values"] == []
    assert report["checkpoints"][0]["facts"].keys() >= {"iteration", "scale"}


@pytest.mark.parametrize("harm", ["size", "chunks", "dtype"])
def test_index_that_makes_no_sense_is_damage(one_process, tmp_path, harm):
    folder = save(tmp_path / "run", values())
    (folder / "checksums.json").unlink()
    index = pickle.loads((folder / ".metadata").read_bytes())
    tensor = index.state_dict_metadata[W]
    if harm == "size":
        tensor.size = torch.Size([-3, 8])
    elif harm == "chunks":
        tensor.chunks = None
    else:
        tensor.properties = 7
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    code, report = inspect(tmp_path, folder)
    (complaint, *_) = report["checkpoints"][0]["complaints"]
    assert code == 4 and ".metadata cannot be read as a checkpoint index" in complaint


def test_megatron_lms_old_format_is_listed_and_compared(tmp_path):
    for which, shift in (("a", 0.0), ("b", 1.0)):
        for rank in range(2):
            folder = tmp_path / which / "iter_0000003" / f"mp_rank_{rank:02d}"
            folder.mkdir(parents=True)
            weights = {"embedding.word_embeddings.weight": torch.full((64, 8), shift * rank)}
            contents = {"model": weights, "iteration": 3, "args": argparse.Namespace(lr=1.0)}
            torch.save(contents, folder / "model_optim_rng.pt")
        (tmp_path / which / "latest_checkpointed_iteration.txt").write_text("3")
    code, report = inspect(tmp_path, tmp_path / "a", tmp_path / "b")
    (first, _) = report["checkpoints"]
    assert code == 1 and first["format"] == "mp_rank" and first["facts"]["iteration"] == 3
    assert [each["shape"] for each in first["tensors"]] == [[64, 8]] * 2
    assert [each["name"][:10] for each in report["comparison"]["differences"]] == ["mp_rank_01"]


@pytest.mark.parametrize(
    ("name", "said"),
    [("a.json", "Megatron-LM\n"), ("config.json", " a Hugging Face folder, which --load takes as it is\n")],
)
def test_no_checkpoint_is_exit_code_4_before_torch_is_imported(tmp_path, name, said):
    (tmp_path / name).write_text("{}")
    code = "import sys, toolkits.inspect_checkpoint as tool; code = tool.main(sys.argv[1:])"
    line = [sys.executable, "-c", f"{code}; sys.exit('torch' in sys.modules or code)", str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 4 and f"ERROR {tmp_path} has no checkpoint, expected" in done.stderr
    assert done.stderr.endswith(said)


def test_run_says_which_layout_it_had(one_process, tmp_path):
    folder = save(tmp_path / "run", values(), config=to_yaml(small_run(tp=2)), versions={"torch": "2.13"})
    (found,) = inspect(tmp_path, folder)[1]["checkpoints"]
    assert found["facts"]["layout"]["tensor_model_parallel_size"] == 2
    assert found["facts"]["processes that wrote it"] == 1 and found["facts"]["versions"] == {"torch": "2.13"}


def test_neighbours_and_links(one_process, tmp_path):
    folder = save(tmp_path / "run", values())
    shutil.copytree(folder, folder.with_name("iter_0000009"))
    (folder.with_name("iter_0000009") / "metadata.json").unlink()
    folder.with_name("best").symlink_to(folder.name)
    _, report = inspect(tmp_path, tmp_path / "run" / "checkpoint" / "best")
    notes = {each["name"]: each["note"] for each in report["checkpoints"][0]["neighbours"]}
    assert notes == {"iter_0000007": "best", "iter_0000009": "incomplete"}
