"""The file of golden values: read, renewed, and what has changed."""

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("values.json")
EVERYWHERE = "everywhere"
Values = dict[str, dict[str, dict[str, Any]]]
"""By a machine's key, or EVERYWHERE; by name of a run or of bytes; by what was measured."""


def read() -> Values:
    return json.loads(FILE.read_text())


def write(values: Values) -> None:
    """A line for each name."""
    parts = []
    for key, named in values.items():
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(found)}" for name, found in named.items())
        parts.append(f" {json.dumps(key)}: {{\n{lines}\n }}")
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def renewed(stored: Values, found: Values) -> Values:
    """`stored` with what this machine found.

    Runs whose bits are others than before lose the values of other machines, which nobody has measured anew.
    """
    same = {
        name
        for key, named in found.items()
        for name, measured in named.items()
        if stored.get(key, {}).get(name, measured) == measured
    }
    kept = {
        key: still
        for key, named in stored.items()
        if key not in found and (still := {name: named[name] for name in named if name in same})
    }
    return {EVERYWHERE: found[EVERYWHERE], **dict(sorted((kept | found).items()))}


def differences(stored: Values, found: Values) -> list[str]:
    """What is not as it was, was not there, or is there no more: a line each."""
    lines = []
    for key, named in (stored | found).items():
        if key not in stored:
            lines.append(f"{key}: recorded for the first time")
            continue
        before, after = stored[key], found.get(key, {})
        for name in before | named:
            old, new = before.get(name, {}), after.get(name, {})
            lines += [
                f"{key}: {name}: {field} {_shown(old.get(field))} -> {_shown(new.get(field))}"
                for field in old | new
                if old.get(field) != new.get(field)
            ]
    return lines


def _shown(value: Any) -> str:
    """Floats as decimal numbers with all their digits."""
    if isinstance(value, list) and value and isinstance(value[0], str) and "0x" in value[0]:
        return f"[{', '.join(repr(float.fromhex(number)) for number in value)}]"
    return str(value)
