"""The source files that the laws of the house apply to, and golden files."""

import ast
import os
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent


class Source(NamedTuple):
    """One Python file: its path below the root, its text, and its syntax tree."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def module(self) -> str:
        """Its dotted name."""
        return ".".join(self.path.with_suffix("").parts).removesuffix(".__init__")


def sources(*folders: str) -> list[Source]:
    found = []
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("*.py")):
            text = file.read_text(encoding="utf-8")
            found.append(Source(file.relative_to(ROOT), text, ast.parse(text)))
    return found


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return ROOT


@pytest.fixture(scope="session")
def house() -> list[Source]:
    """What users run: patch, examples, toolkits."""
    return sources("patch", "examples", "toolkits")


@pytest.fixture(scope="session")
def all_sources(house) -> list[Source]:
    """The house and its tests."""
    return [*house, *sources("tests")]


@pytest.fixture
def golden():
    """Compare a text with the file of that name here; RENEW_GOLDEN=1 writes it instead."""

    def check(name: str, text: str) -> None:
        file = GOLDEN / name
        if os.environ.get("RENEW_GOLDEN"):
            file.write_text(text)
        assert text == file.read_text(), (
            f"a contract changed: RENEW_GOLDEN=1 renews {name}; say so in CHANGELOG"
        )

    return check
