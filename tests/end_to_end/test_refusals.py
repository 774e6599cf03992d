"""Refusals through the shell: exit code, one clear message, nothing written."""

import os
import shutil
import socket
from pathlib import Path

import pytest
import yaml
from end_to_end.conftest import Office
from end_to_end.shell import call, command

from patch.storage.lock import hold_run

pytestmark = pytest.mark.long


@pytest.mark.parametrize("flag", ["--max-restarts=1", "--log-dir=logs"])
def test_what_only_our_launcher_does_is_refused_under_another_one(
    office: Office, tmp_path: Path, flag: str
) -> None:
    result = call([*command(**office.positions(tmp_path / "out")), flag], LOCAL_RANK=0, WORLD_SIZE=1)
    assert result.returncode == 2, result.stderr
    assert f"{flag.partition('=')[0]}: got" in result.stderr and "torchrun or SLURM" in result.stderr


def test_missing_data_is_refused_after_the_configuration(office: Office, tmp_path: Path) -> None:
    paths = office.positions(tmp_path / "out")
    missing = {**paths, "DATASET_PATH": tmp_path / "none.json"}
    result = call(command(**missing))
    assert result.returncode == 3
    assert "none.json" in result.stderr
    assert call(command(**missing, PR="fp17")).returncode == 2


def test_output_that_cannot_be_made_is_refused_without_a_process(office: Office) -> None:
    for flags in ([], ["--dry-run"]):
        result = call([*command(**office.positions(Path("/proc/foo"))), *flags])
        assert result.returncode == 2, result.stderr
        assert "/proc is not writable" in result.stderr and "OMP_NUM_THREADS" not in result.stderr


def test_folder_of_a_run_that_is_still_going_on_is_refused_at_once(office: Office, tmp_path: Path) -> None:
    with hold_run(tmp_path / "out"):
        result = call(command(**office.positions(tmp_path / "out")))
        assert result.returncode == 2, result.stderr
        assert f"process {os.getpid()} on {socket.gethostname()} since" in result.stderr
        assert "OUTPUT_BASEPATH" in result.stderr and "OMP_NUM_THREADS" not in result.stderr
        assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]
        assert call([*command(**office.positions(tmp_path / "out")), "--dry-run"]).returncode == 0


def test_dry_run_prints_the_run_and_writes_nothing(office: Office, tmp_path: Path) -> None:
    positions = command(**{**office.positions(tmp_path / "out"), "AC": "auto"})
    result = call([*positions, "--simulated-device-memory=1e9", "--dry-run"])
    assert result.returncode == 0, result.stderr
    run = yaml.safe_load(result.stdout)
    assert run["training"]["recompute_granularity"] == "none" and "a rank, chosen" in result.stderr
    assert run["model"]["hidden_size"] == 64
    assert run["parallel"]["nproc_per_node"] == 2
    assert list(tmp_path.iterdir()) == []
    assert f"{office.train}: line 1: " in result.stderr and "learned \u2503 " in result.stderr
    assert "400 samples in one epoch\nlength      8 steps = 0.16 epochs of 400 samples" in result.stderr


@pytest.mark.parametrize("position", ["DATASET_PATH", "VALID_DATASET_PATH"])
def test_first_row_that_cannot_be_used_is_refused_without_a_process(
    office: Office, tmp_path: Path, position: str
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "x", "answer": "y"}\n' + office.train.read_text())
    positions = {**office.positions(tmp_path / "out"), position: rows}
    for flags in ([], ["--dry-run"]):
        result = call([*command(**positions), *flags])
        assert result.returncode == 3 and "rows.jsonl: line 1" in result.stderr, result.stderr
        assert "OMP_NUM_THREADS" not in result.stderr and list(tmp_path.iterdir()) == [rows]


@pytest.mark.parametrize("flags", [["--dry-run"], []])
def test_launcher_looks_at_headers_of_weights(flags: list[str], office: Office, tmp_path: Path) -> None:
    model = shutil.copytree(office.model, tmp_path / "model")
    (file,) = model.glob("*.safetensors")
    os.truncate(file, file.stat().st_size - 1000)
    positions = {**office.positions(tmp_path / "out"), "PRETRAIN_CHECKPOINT_PATH": model}
    result = call([*command(**positions), *flags])
    assert result.returncode == 4 and "local rank" not in result.stderr, result.stderr
    assert f"--load (position 22 PRETRAIN_CHECKPOINT_PATH): {file} (" in result.stderr
    assert "Traceback" not in result.stderr and not (tmp_path / "out").exists()


def test_malformed_row_ends_all_workers_with_one_message(office: Office, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text(office.train.read_text() + '{"instruction": "no end\n')
    result = call(command(**{**office.positions(tmp_path / "out"), "DATASET_PATH": broken}))
    assert result.returncode == 3, result.stderr
    assert "broken.jsonl" in result.stderr and "401" in result.stderr
    assert result.stderr.count("broken.jsonl") == 1, result.stderr
