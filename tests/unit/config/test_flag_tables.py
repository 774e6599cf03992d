"""Tables of the guides are generated from the schema and the table of features.

A table follows its line: `<!-- flags: FIELD ... -->`, `<!-- conflicts: FIELD ... -->` (of the features that
these fields turn on) or `<!-- features: proven -->`. RENEW_GOLDEN=1 writes the tables anew.
"""

import os
import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from patch.config.fields import FIELDS
from patch.config.flags import spellings
from patch.features.table import CONFLICTS, FEATURES, Feature

DOCS = Path(__file__).parents[3] / "docs"
TABLE = re.compile(r"(<!-- (flags|conflicts|features): ([a-z0-9_ ]+) -->\n\n)((?:\|.*\n)*)")


def flags(names: str) -> str:
    rows = ["| flag | meaning | default |", "| --- | --- | --- |"]
    for field in map(FIELDS.__getitem__, names.split()):
        default = field.to_scalar(field.default)
        flag, *other = spellings(field)
        if default is True:
            flag = other[0]
        words = {True: "on", False: "off"}.get(default, default) if field.kind is bool else default
        rows.append(f"| `{flag}` | {field.help} | {words} |")
    return "\n".join(rows) + "\n"


def conflicts(fields: str) -> str:
    """Each feature of these fields with all that exclude it; the second of two such features is left out."""
    rows, said = ["| | not together with |", "| --- | --- |"], set()
    for feature in (each for field in fields.split() for each in FEATURES if each.field == field):
        met = (each[:2] for each in CONFLICTS if feature in each[:2])
        others = [b if a is feature else a for a, b in met]
        if others := [other.name for other in others if other not in said]:
            rows.append(f"| {feature.name} | {', '.join(others)} |")
        said.add(feature)
    return "\n".join(rows) + "\n"


def features(_: str) -> str:
    """The features by the largest machine that has run them; the longest list is "all others"."""
    rows, machines = ["| tested on | features |", "| --- | --- |"], [each.proven for each in FEATURES]
    for machine in get_args(get_type_hints(Feature)["proven"]):
        names = ", ".join(each.name for each in FEATURES if each.proven == machine) or "none"
        longest = max(machines, key=machines.count)
        rows.append(f"| {machine} | {'all others' if machine == longest else names} |")
    return "\n".join(rows) + "\n"


KINDS = {"flags": flags, "conflicts": conflicts, "features": features}

PAGES = sorted(page for page in DOCS.glob("*.md") if TABLE.search(page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_generated_from_schema_and_features(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    renewed = TABLE.sub(lambda found: found[1] + KINDS[found[2]](found[3]), text)
    if os.environ.get("RENEW_GOLDEN"):
        page.write_text(renewed, encoding="utf-8")
    assert renewed == text, "RENEW_GOLDEN=1 writes the tables anew"
