"""The path from a file of chats to a model, as README.md has it: its lines are run, up to the training."""

import subprocess
from pathlib import Path

import yaml
from end_to_end.conftest import Office
from end_to_end.shell import REPOSITORY, environment
from guide_pages import blocks_of


def test_the_commands_of_the_readme_work_as_they_stand(office: Office, tmp_path: Path) -> None:
    commands = next(b.text for b in blocks_of(REPOSITORY / "README.md") if "llama-patch train" in b.text)
    preview, train = commands.split("\n", 1)
    assert preview.startswith("llama-patch preview ") and train.startswith("llama-patch train ")
    own = f"DATA={office.train} MODEL={office.model} RUN={tmp_path / 'run'}"
    program = 'llama-patch() { "$PYTHON" -m toolkits.command "$@"; }'
    lines = [own, program, preview.split("#")[0] + " --no-statistics >&2", train.strip() + " --dry-run"]
    result = subprocess.run(
        ["bash", "-ec", "\n".join(lines)],
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
