"""Source files that the architecture rules apply to, and golden files."""

import ast
import os
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent


class Source(NamedTuple):
    """A Python file: path below the root, text, syntax tree."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def module(self) -> str:
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
    return ROOT


@pytest.fixture(scope="session")
def house() -> list[Source]:
    """Return the sources of the product: patch, examples, toolkits."""
    return sources("patch", "examples", "toolkits")


@pytest.fixture(scope="session")
def all_sources(house) -> list[Source]:
    """Return the sources of the product and of the tests."""
    return [*house, *sources("tests")]


@pytest.fixture
def golden():
    """Compare a text with the golden file of this name, or write it if RENEW_GOLDEN is set."""

    def check(name: str, text: str) -> None:
        file = GOLDEN / name
        if os.environ.get("RENEW_GOLDEN"):
            file.write_text(text)
        assert text == file.read_text(), (
            f"a contract changed: RENEW_GOLDEN=1 renews {name}; say so in CHANGELOG"
        )

    return check
