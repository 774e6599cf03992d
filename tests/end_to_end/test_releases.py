"""A run resumes under another release of megatron-core, with the bits of an uninterrupted run.

OTHER_PYTHON names a Python with that release, such as .ci/run makes. The test runs under both releases.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from end_to_end.conftest import Office
from end_to_end.shell import REPOSITORY, call, command

OTHER = os.environ.get("OTHER_PYTHON", "")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not OTHER, reason="OTHER_PYTHON names no Python with another megatron-core"),
]


def train(office: Office, python: str, run: Path) -> None:
    positions = {**office.positions(run), "VALID_DATASET_PATH": "none", "TRAIN_TOKENS_OR_ITERS": 4}
    ended = call(command(**positions, SAVE_INTERVAL=2, TP=2, DO="true"), PYTHON=python)
    assert ended.returncode == 0, ended.stderr


def release_of(python: str) -> str:
    asked = [python, "-c", "from importlib.metadata import version; print(version('megatron-core'))"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("first", ["this", "other"])
def test_a_resume_crosses_releases_to_the_bit(office: Office, tmp_path: Path, first: str) -> None:
    pythons = [sys.executable, OTHER] if first == "this" else [OTHER, sys.executable]
    assert len(set(map(release_of, pythons))) == 2, "both have the same megatron-core"
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train(office, pythons[0], whole)
    shutil.copytree(whole / "checkpoint", resumed / "checkpoint", symlinks=True)
    shutil.copy(whole / "config.yaml", resumed)
    shutil.rmtree(resumed / "checkpoint" / "iter_0000004")
    train(office, pythons[1], resumed)
    compared = [sys.executable, "-m", "toolkits.inspect_checkpoint", str(whole), str(resumed)]
    said = subprocess.run(compared, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stdout + said.stderr
