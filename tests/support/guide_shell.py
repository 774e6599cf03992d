"""A page's bash blocks in a real bash whose programs only note how they were called.

The script has the page's own line numbers: everything that is no command is an empty line. Programs of
`RECORDED` are found first on PATH and write line, folder, arguments and variables into a file each.
"""

import os
import subprocess
from pathlib import Path
from typing import NamedTuple

from guide_pages import REPOSITORY, Block, blocks_of

RECORDED = (
    "python", "python3", "llama-patch", "make", "pip", "torchrun", "srun", "sbatch", "salloc", "scancel",
    "squeue", "sinfo", "ssh", "scp", "rsync", "nvidia-smi", "vllm", "git", "tensorboard", "curl", "hf",
    "sleep", "tail", "watch", "kill", "py-spy", "apt-get", "module", "docker",
)  # fmt: skip
_TIMEOUT_S = 60

# The name begins with the time, so that files sort as the calls came.
_PROGRAM = """#!/bin/bash
name=${0##*/}
{ printf '%s\\0' "$GUIDE_LINE" "$PWD" "$#" "$name" "$@"; env -0; } >"$GUIDE_CALLS/$EPOCHREALTIME.$$"
"""
_PRELUDE = """unset BASH_ENV
set -eu
enable -n kill
trap 'export GUIDE_LINE=$LINENO' DEBUG
trap 'echo "line $GUIDE_LINE: ended with $?: $BASH_COMMAND" >&2' ERR
"""


class Call(NamedTuple):
    """A program that a block calls."""

    line: int
    folder: Path
    argv: list[str]
    """Its name first."""
    environ: dict[str, str]


def calls_of(page: Path, folder: Path, variables: dict[str, str]) -> tuple[list[Call], str]:
    """Run all bash blocks of a page in one bash; the calls in their order, and what bash complains of.

    Args:
        page: the document.
        folder: a new one for the programs; the blocks run in its `repository`, which shows the repository's.
        variables: the environment of the blocks.
    """
    places = [folder / name for name in ("bin", "calls", "repository", "home")]
    for place in places:
        place.mkdir(parents=True)
    programs, calls, root, home = places
    for name in RECORDED:
        (programs / name).write_text(_PROGRAM)
        (programs / name).chmod(0o755)
    show_repository(root)
    (folder / "prelude").write_text(_PRELUDE)
    script = folder / page.name
    script.write_text(script_of(blocks_of(page)))
    environ = {
        "PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(home), "LANG": "C.UTF-8",
        "BASH_ENV": str(folder / "prelude"), "GUIDE_CALLS": str(calls), "GUIDE_LINE": "0",
        "PYTHON": str(programs / "python"), **variables,
    }  # fmt: skip
    ended = subprocess.run(
        ["bash", str(script)],
        cwd=root,
        env=environ,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    made = [_read(file) for file in sorted(calls.iterdir())]
    complaint = ended.stderr.replace(f"{folder}/", "").strip()
    return made, f"bash ended with {ended.returncode}: {complaint}" if ended.returncode else ""


def show_repository(root: Path) -> None:
    """Links to what the repository holds; what blocks write beside it stays here."""
    for entry in REPOSITORY.iterdir():
        if not entry.name.startswith("."):
            (root / entry.name).symlink_to(entry)
    (root / ".venv/bin").mkdir(parents=True)
    (root / ".venv/bin/activate").touch()


def script_of(blocks: list[Block]) -> str:
    """The commands at the lines that they have on the page."""
    lines: list[str] = []
    for block in blocks:
        if block.is_bash:
            lines += [""] * (block.line - 1 - len(lines))
            lines += block.text.splitlines()
    return "\n".join(lines) + "\n"


def _read(file: Path) -> Call:
    texts = file.read_bytes().decode().split("\0")
    line, folder, count = int(texts[0]), Path(texts[1]), int(texts[2])
    argv, variables = texts[3 : 4 + count], texts[4 + count :]
    environ = dict(text.split("=", 1) for text in variables if "=" in text)
    return Call(line, folder, argv, environ)
