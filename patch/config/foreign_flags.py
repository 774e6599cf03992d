"""Arguments of other programs: what to write here instead, why nothing is needed, or that it is unsupported.

foreign_flags.txt is the only table of them. Messages about unknown flags and unknown keys of files, and the
command of `llama-patch migrate`, come from the table (`tests/unit/config/test_flags.py`).

Source: Pai-Megatron-Patch's scripts, Megatron-LLaMA's and Megatron-LM's arguments, BigScience's
Megatron-DeepSpeed, DeepSpeed's JSON, LLaMA-Factory's and Axolotl's YAML, torchtitan's TOML, transformers,
PEFT, TRL, vLLM, torchrun.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import NamedTuple

from patch.errors import shown
from patch.text import to_float

_ALIKE = 0.75
"""Similarity from which two words are the same word, misspelled."""
_ONE_NAME = 0.85
"""Similarity from which two whole names are the same; their words may be joined differently."""
_OFF = ("false", "null")
"""Values that do not match a table row with a name alone."""
_UNKNOWN = ": remove it, nothing here has this name"
_LONGEST = 100
"""Longer names get no suggestion: no flag is near, and the search would be slow."""


class ForeignFlag(NamedTuple):
    """A row of the table: arguments of another program that have one answer."""

    theirs: str
    ours: str
    """Our flags that do the same, between spaces; "-" if there is none."""
    advice: str
    """The difference, or what to do if `ours` is "-"."""
    value: str = ""
    """Value for our flags, as foreign_flags.txt describes it; "" if a person has to decide."""

    @property
    def answer(self) -> str:
        """The advice, as a message."""
        return self.advice if self.ours == "-" else f"use {' and '.join(self.ours.split())}: {self.advice}"

    def fit(self, name: str, value: str) -> int:
        """Rate the row for a name and value: 3, 2 this value, 1 any value, 0 other values, -1 other name."""
        parts = [part for part in self.theirs.split(", ") if fnmatchcase(plain_name(name), plain_name(part))]
        return max((_fit_of_value(part, value.lower() or "true") for part in parts), default=-1)


def _fit_of_value(part: str, value: str) -> int:
    """Rate a value as `fit` does for one name of the table: `NAME VALUE`, `NAME X` or `NAME`."""
    wanted = re.split("[ :=]+", part, maxsplit=1)[1:]
    if wanted in ([], ["X"]):
        return int(bool(wanted) or value not in _OFF)
    pattern, number = wanted[0].lower(), to_float(value)
    if pattern == value or (number is not None and number == to_float(pattern)):
        return 3
    return 2 * fnmatchcase(value, pattern)


@cache
def foreign_flags() -> dict[str, list[ForeignFlag]]:
    """Return program -> rows, in the order of the table."""
    return {program: rows for (program, is_default), rows in _table().items() if not is_default}


def foreign_defaults(program: str) -> list[ForeignFlag]:
    """Return what a program does without some of its arguments; `theirs` names them, as the table says."""
    return _table().get((program, True), [])


@cache
def _table() -> dict[tuple[str, bool], list[ForeignFlag]]:
    """Return (program, whether a row is a default of it) -> rows."""
    table: dict[tuple[str, bool], list[ForeignFlag]] = {}
    program = ""
    for line in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            program = line.strip("[]")
        elif line and not line.startswith("#"):
            rows = table.setdefault((program, line.startswith("= ")), [])
            rows.append(ForeignFlag(*line.removeprefix("= ").split(" | ")))
    return table


def plain_name(text: str) -> str:
    """Return a name without leading hyphens, value and case: `--max_steps=2` is `max-steps`."""
    return re.split("[ :=]", text.lstrip("-"), maxsplit=1)[0].replace("_", "-").lower()


def foreign_flag(name: str, value: str = "", program: str = "") -> ForeignFlag | None:
    """Return the answer to another program's flag or key at a value, or None if the table lacks the name.

    Args:
        name: as the user wrote it; for a key of a nested file, the table may have only its last part.
        value: its value as text; "" for a flag without a value.
        program: search only the rows of this program; "": all.
    """
    last = name.rpartition(".")[2]
    for each, text in ((name, value), (last, value), (plain_name(name).removeprefix("no-"), "false")):
        if (best := _best(each, text, program)).fit(each, text) >= 0:
            at_any = _best(each, "any", program)
            return best if best.fit(each, text) else _unsupported(name, at_any, text.lower())
    return None


def _best(name: str, value: str, program: str) -> ForeignFlag:
    rows = (row for each, rows in foreign_flags().items() if program in ("", each) for row in rows)
    return max(rows, key=lambda row: row.fit(name, value))


def _unsupported(name: str, at_any: ForeignFlag, value: str) -> ForeignFlag:
    """Return the answer at a value without a row: "remove it" for false and null, or "not supported"."""
    is_always_on = at_any.ours == "-" and not at_any.advice.startswith("not there")
    if value not in _OFF or (value == "false" and is_always_on):
        return ForeignFlag(name, "-", f"not supported at this value, {shown(value)}")
    without = "" if at_any.ours == "-" else f" without {at_any.ours}"
    return ForeignFlag(name, "-", f"remove it: it is {'not set' if value == 'null' else f'off{without}'}")


def is_meant_otherwise(flag: str, value: str) -> bool:
    """Return whether a flag of ours is meant as another program's flag at this value."""
    row = foreign_flag(flag, value)
    return row is not None and flag not in row.ours.split() and f"{flag} " in row.theirs


def nearest_flag(name: str, known: Iterable[str]) -> str:
    """Return a hint ", did you mean --X?" for an unknown flag, or "" if no flag is near.

    Names are near if they have the same words, up to misspellings; common letters are not enough.
    """
    flags = list(known) if len(name) < _LONGEST else []
    row = foreign_flag(name)
    ours = next((flag for flag in row.ours.split() if flag in flags), None) if row is not None else None
    likeness = {flag: _likeness(plain_name(name).split("-"), plain_name(flag).split("-")) for flag in flags}
    best = ours or max(flags, key=lambda flag: likeness[flag], default="")
    return f", did you mean {best}?" if ours or likeness.get(best) else ""


def _likeness(words: list[str], others: list[str]) -> float:
    """Return the similarity of two names: as a whole, or if `others` has all `words`; otherwise 0."""
    whole = SequenceMatcher(None, "".join(words), "".join(others)).ratio()
    least = min(max(SequenceMatcher(None, word, other).ratio() for other in others) for word in words)
    is_part = least >= _ALIKE and 2 * len(words) > len(others)
    return whole if whole >= _ONE_NAME or is_part else 0.0


def answers(given: Iterable[tuple[str, str]], known: Iterable[str]) -> list[str]:
    """Return one line for each answer to unknown (name, value) pairs; `known` are our flags."""
    flags = list(known)
    named: dict[str, list[str]] = {}
    for name, value in dict.fromkeys(given):
        row, last = foreign_flag(name, value), name.rpartition(".")[2]
        own = f"--{plain_name(last)}"
        hint = f": use {own}, the same name" if own in flags else nearest_flag(last, flags) or _UNKNOWN
        named.setdefault(hint if row is None else f": {row.answer}", []).append(name)
    return [f"{', '.join(dict.fromkeys(names))}{said}" for said, names in named.items()]
