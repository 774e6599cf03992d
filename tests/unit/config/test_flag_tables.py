"""The guides' tables of flags are generated from the schema: after a line `<!-- flags: NAME ... -->`.

RENEW_GOLDEN=1 writes them anew.
"""

import os
import re
from pathlib import Path

import pytest

from patch.config.fields import FIELDS
from patch.config.flags import spellings

DOCS = Path(__file__).parents[3] / "docs"
TABLE = re.compile(r"(<!-- flags: ([a-z0-9_ ]+) -->\n\n)((?:\|.*\n)*)")


def table(names: str) -> str:
    rows = ["| flag | meaning | default |", "| --- | --- | --- |"]
    for field in map(FIELDS.__getitem__, names.split()):
        default = field.to_scalar(field.default)
        flag, *other = spellings(field)
        if default is True:
            flag = other[0]
        words = {True: "on", False: "off"}.get(default, default) if field.kind is bool else default
        rows.append(f"| `{flag}` | {field.help} | {words} |")
    return "\n".join(rows) + "\n"


PAGES = sorted(page for page in DOCS.glob("*.md") if "<!-- flags" in page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_of_flags_are_generated_from_the_schema(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    renewed = TABLE.sub(lambda found: found[1] + table(found[2]), text)
    if os.environ.get("RENEW_GOLDEN"):
        page.write_text(renewed, encoding="utf-8")
    assert renewed == text, "RENEW_GOLDEN=1 writes the tables of flags anew"
