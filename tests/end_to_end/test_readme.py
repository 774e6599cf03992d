"""The path from a file of chats to a model, as README.md has it: its lines are run, up to the training."""

import subprocess
from pathlib import Path

import yaml
from end_to_end.conftest import Office
from end_to_end.shell import REPOSITORY, environment


def commands(readme: str) -> list[str]:
    """The indented lines from the user's own paths on, without comments."""
    lines = (REPOSITORY / readme).read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("    DATA="))
    block = lines[first : lines.index("", first)]
    return [line.split("    #")[0].strip() for line in block]


def test_both_languages_have_the_same_commands() -> None:
    assert commands("README.md") == commands("README_zh.md")


def test_the_commands_of_the_readme_work_as_they_stand(office: Office, tmp_path: Path) -> None:
    own, preview, *lines = commands("README.md")
    assert own.startswith("DATA=chats.json MODEL=") and preview.startswith(".venv/bin/python -m toolkits.")
    assert lines[-2:] == ["train --dry-run", "train"]
    own = f"DATA={office.train} MODEL={office.model} RUN={tmp_path / 'run'}"
    preview = preview.replace(".venv/bin/python", "$PYTHON") + " --no-statistics >&2"
    result = subprocess.run(
        ["bash", "-ec", "\n".join([own, preview, *lines[:-1]])],
        env=environment(NPROC_PER_NODE=1),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    run = yaml.safe_load(result.stdout)
    assert run["checkpoint"]["export_hf"] is True and run["training"]["train_epochs"] == 1
    assert result.stderr.count(f"{office.train}: line 1: ") == 2
    assert result.stderr.endswith("400 samples in one epoch\nlength      25 steps = 1 epoch of 400 samples\n")
