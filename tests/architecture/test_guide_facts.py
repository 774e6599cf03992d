"""Guides that quote the code: messages, flags, positions and packages that they name exist."""

import ast
import re
from pathlib import Path

import pytest
from architecture.test_imports import ROWS
from guides import read_page

from patch.config.fields import FIELDS
from patch.config.flags import spellings
from patch.config.foreign_flags import foreign_flags
from patch.config.positions import POSITIONS, VARIABLES

GUIDES = Path("docs")
LANGUAGES = ("", "_zh")
FLAGS = {flag for field in FIELDS.values() for flag in spellings(field)}
VALUE = "\0"
"""What stands for a value in a string of the program."""


def _guide(root: Path, name: str) -> Path:
    return root / GUIDES / f"{name}.md"


def _said(node: ast.expr) -> str:
    """A string of the program, with a mark for each value; "" for what is no string."""
    if isinstance(node, ast.Constant):
        # Values of the log's and of printf's formats.
        return re.sub(r"%(\.\d)?[sdfg]", VALUE, node.value) if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_said(part) or VALUE for part in node.values)
    if isinstance(node, ast.BinOp):
        return _said(node.left) + _said(node.right)
    return ""


def _strings(house) -> str:
    """All strings that the program may print, docstrings left out, one after the other."""
    found = []
    for source in house:
        nodes = list(ast.walk(source.tree))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        found += [
            _said(node)
            for node in nodes
            if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp) and id(node) not in docstrings
        ]
    return "\n".join(found)


def _lost(message: str, strings: str) -> list[str]:
    """The runs of words between the values of a quoted message that no string has."""
    # Some messages are put together of several strings, with a colon or a comma between them.
    runs = (run.strip(" :;,()") for run in message.split("..."))
    return [run for run in runs if run not in strings]


def _messages(page: Path) -> list[str]:
    return [row[0].strip("`") for _, row in read_page(page).rows if row[0].startswith("`") and len(row) == 3]


def test_a_message_that_nothing_prints_is_seen():
    strings = _said(ast.parse('f"got {x}, expected {y}: a" " value"', mode="eval").body)
    assert not _lost("got ..., expected ...: a value", strings)
    assert _lost("got ..., wanted ...: a value", strings) == ["wanted"]


def test_quoted_messages_are_those_of_the_program(root, house):
    strings = _strings(house)
    messages = _messages(_guide(root, "troubleshooting"))
    assert len(messages) >= 40 and len(messages) == len(set(messages))
    assert not [message for message in messages if max(map(len, message.split("..."))) < 12]
    assert not {message: lost for message in messages if (lost := _lost(message, strings))}


@pytest.mark.parametrize("language", LANGUAGES)
def test_tables_of_other_programs_are_the_one_that_messages_have(root, language):
    """foreign_flags.txt, row by row; in Chinese the first two cells. Other rows are about positions."""
    guide = read_page(_guide(root, f"migrating{language}")).rows
    for program, rows in foreign_flags().items():
        wanted = [
            [
                ", ".join(f"`{name}`" for name in row.theirs.split(", ")),
                " ".join(f"`{flag}`" for flag in row.ours.split()) if row.ours != "-" else "-",
                row.advice,
            ][: 2 if language else 3]
            for row in rows
        ]
        heading = "\u5176\u4ed6\u540d\u5b57" if language and program == "Other names" else program
        found = [cells[: len(wanted[0])] for above, cells in guide if above == heading]
        assert found[-len(wanted) :] == wanted, program


@pytest.mark.parametrize("language", LANGUAGES)
def test_names_that_a_user_moves_over_to_exist(root, language):
    known = FLAGS | {"--config"} | VARIABLES.keys() | {position.name for position in POSITIONS}
    rows = [row for _, row in read_page(_guide(root, f"migrating{language}")).rows]
    ours = [name for row in rows if len(row) == 3 for name in re.findall(r"`([^`]+)`", row[1])]
    assert len(ours) > 60 and not [name for name in ours if name not in known]
    same = [name for row in rows if len(row) == 2 for name in re.findall(r"`([^`]+)`", row[1])]
    assert len(same) > 70 and not [name for name in same if name not in FLAGS]


def test_architecture_lists_the_packages_from_top_to_bottom(root):
    firsts = [row[0] for _, row in read_page(_guide(root, "architecture")).rows]
    packages = [found[1] for text in firsts if (found := re.fullmatch(r"`(\w+(?:\.py)?)/?`", text))]
    there = {
        path.name
        for path in (root / "patch").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert sorted(packages) == sorted(there - {"__init__.py"})
    rows = [ROWS[f"patch.{package.removesuffix('.py')}"] for package in packages]
    assert rows == sorted(rows)
