"""The installed project. Its import makes the packages `patch` and `toolkits` findable.

    import llama_megatron_patch
    from patch.data import load_sft

A wheel has both inside this package, because PyPI has other packages of these names. In a process that
imports this one they are the project's; other programs keep theirs.
"""

from __future__ import annotations

import sys
from pathlib import Path

_FILE = Path(__file__).resolve()
ROOT = next(folder for folder in _FILE.parents if (folder / "patch" / "py.typed").is_file())
"""The folder with `patch`, `toolkits` and `examples`: of this package in a wheel, of the repository else."""
sys.path.insert(0, str(ROOT))


def main() -> int:
    """The command llama-patch; returns its exit code."""
    from toolkits.command import main as run_command

    return run_command()
