"""Guides name existing packages and the installed versions; the site lists every guide."""

import re
import tomllib

from architecture.test_imports import ROWS
from guides import read_page


def test_architecture_lists_the_packages_from_top_to_bottom(root):
    firsts = [row[0] for _, row in read_page(root / "docs/architecture.md").rows]
    packages = [found[1] for text in firsts if (found := re.fullmatch(r"`(\w+(?:\.py)?)/?`", text))]
    there = {
        path.name
        for path in (root / "patch").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert sorted(packages) == sorted(there - {"__init__.py"})
    rows = [ROWS[f"patch.{package.removesuffix('.py')}"] for package in packages]
    assert rows == sorted(rows)


def test_the_site_lists_each_document_once(root):
    listed = re.findall(r": (\S+\.md)$", (root / "mkdocs.yml").read_text(), re.MULTILINE)
    elsewhere = [name.removeprefix("repository/") for name in listed if name.startswith("repository/")]
    assert elsewhere and not [name for name in elsewhere if not (root / name).is_file()]
    guides = [name for name in listed if not name.startswith("repository/")]
    assert sorted(guides) == sorted(path.name for path in (root / "docs").glob("*.md"))


def test_versions_are_those_of_the_requirements(root):
    rows = {row[0]: row[1:] for _, row in read_page(root / "docs/architecture.md").rows}
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    allowed = dict(re.fullmatch(r"([\w-]+)(.*)", text).groups() for text in project["dependencies"])
    allowed["Python"] = project["requires-python"]
    for name in ("Python", "torch", "megatron-core", "transformers"):
        assert rows[name][0] == f"`{allowed[name]}`"
    for file in ("requirements.txt", "requirements-gpu.txt"):
        pins = re.findall(r"^([\w-]+)(?:\[.*\])?==([\w.]+)", (root / file).read_text(), re.MULTILINE)
        of_table = [(name, version) for name, version in pins if name in rows]
        assert of_table and not [pin for pin in of_table if pin[1] not in rows[pin[0]][1]]
