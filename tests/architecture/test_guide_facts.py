"""Guides that quote the code: the packages that they name exist."""

import re

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
