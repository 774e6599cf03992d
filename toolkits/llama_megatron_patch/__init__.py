"""The installed project. Importing it makes the packages `patch` and `toolkits` importable.

    import llama_megatron_patch
    from patch.data import load_sft

A wheel contains both packages inside this one, because PyPI has other packages of the same names. A program
that imports this package gets the project's; other programs keep theirs.
"""

from __future__ import annotations

import sys
from pathlib import Path

_FILE = Path(__file__).resolve()
ROOT = next(folder for folder in _FILE.parents if (folder / "patch" / "py.typed").is_file())
"""Folder with `patch`, `toolkits` and `examples`: this package in a wheel, otherwise the repository."""
sys.path.insert(0, str(ROOT))


def main() -> int:
    """Run the command llama-patch; return its exit code."""
    from toolkits.command import main as run_command

    return run_command()
