"""Arguments of other programs: what to write here instead, or why nothing is needed, or that it is not there.

foreign_flags.txt is the one table of them: messages about unknown flags and keys of files come from it
(`tests/unit/config/test_flags.py`).

Source: Pai-Megatron-Patch's scripts, Megatron-LLaMA's and Megatron-LM's arguments, BigScience's
Megatron-DeepSpeed, DeepSpeed's JSON, LLaMA-Factory's YAML, torchtitan's TOML, transformers, PEFT, TRL, vLLM,
torchrun.
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
from patch.numbers import to_float

_ALIKE = 0.75
"""From here on two words are one word, misspelled."""
_ONE_NAME = 0.85
"""The same for whole names, whose words may be joined otherwise."""
_OFF = ("false", "null")
"""Values at which a name alone in the table has no answer."""
_UNKNOWN = ": remove it, nothing here has this name"
_LONGEST = 100
"""No flag is near a longer name, and looking for one would take long."""


class ForeignFlag(NamedTuple):
    """Arguments of another program that have one answer: a row of the table."""

    theirs: str
    ours: str
    """The flags that do the same, between spaces; "-" if there is none."""
    advice: str
    """The difference; or what to do, where `ours` is "-"."""

    @property
    def answer(self) -> str:
        """The advice, as a message."""
        return self.advice if self.ours == "-" else f"use {' and '.join(self.ours.split())}: {self.advice}"

    def fit(self, name: str, value: str) -> int:
        """How closely the row suits a name at a value: 3, 2 this value, 1 any, 0 others; -1 not the name."""
        parts = [part for part in self.theirs.split(", ") if fnmatchcase(plain_name(name), plain_name(part))]
        return max((_fit_of_value(part, value.lower() or "true") for part in parts), default=-1)


def _fit_of_value(part: str, value: str) -> int:
    """The same of a name with its value in the table: `NAME VALUE`, `NAME X` or `NAME`."""
    wanted = re.split("[ :=]+", part, maxsplit=1)[1:]
    if wanted in ([], ["X"]):
        return int(bool(wanted) or value not in _OFF)
    pattern, number = wanted[0].lower(), to_float(value)
    if pattern == value or (number is not None and number == to_float(pattern)):
        return 3
    return 2 * fnmatchcase(value, pattern)


@cache
def foreign_flags() -> dict[str, list[ForeignFlag]]:
    """Program -> its rows, in the order of the table."""
    table: dict[str, list[ForeignFlag]] = {}
    for line in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            rows = table[line.strip("[]")] = []
        elif line and not line.startswith("#"):
            rows.append(ForeignFlag(*line.split(" | ")))
    return table


def plain_name(text: str) -> str:
    """A name alone, without hyphens in front, value or case: `--max_steps=2` is `max-steps`."""
    return re.split("[ :=]", text.lstrip("-"), maxsplit=1)[0].replace("_", "-").lower()


def foreign_flag(name: str, value: str = "") -> ForeignFlag | None:
    """The answer to another program's flag or key at a value; None if the table does not have the name.

    Args:
        name: as it was written; of a key in a nested file also its last part may be in the table.
        value: its value as text; "" for a flag without one.
    """
    last = name.rpartition(".")[2]
    for each, text in ((name, value), (last, value), (plain_name(name).removeprefix("no-"), "false")):
        if (best := _best(each, text)).fit(each, text) >= 0:
            at_any = _best(each, "any")
            return best if best.fit(each, text) else _unsupported(name, at_any, text.lower())
    return None


def _best(name: str, value: str) -> ForeignFlag:
    rows = (row for rows in foreign_flags().values() for row in rows)
    return max(rows, key=lambda row: row.fit(name, value))


def _unsupported(name: str, at_any: ForeignFlag, value: str) -> ForeignFlag:
    """The answer at a value without a row. False and null are what is so without a flag, if there is one."""
    is_always_on = at_any.ours == "-" and not at_any.advice.startswith("not there")
    if value not in _OFF or (value == "false" and is_always_on):
        return ForeignFlag(name, "-", f"not supported at this value, {shown(value)}")
    without = "" if at_any.ours == "-" else f" without {at_any.ours}"
    return ForeignFlag(name, "-", f"remove it: it is {'not set' if value == 'null' else f'off{without}'}")


def is_meant_otherwise(flag: str, value: str) -> bool:
    """Whether a flag that is known here is another one's, with this value, in a line of another program."""
    row = foreign_flag(flag, value)
    return row is not None and flag not in row.ours.split() and f"{flag} " in row.theirs


def nearest_flag(name: str, known: Iterable[str]) -> str:
    """A hint ", did you mean --X?" for an unknown flag, or "" when none is near in sense.

    Near are names whose words are the same, up to misspellings; letters in common are not enough.

    Args:
        name: what was written, with its hyphens.
        known: the flags.
    """
    flags = list(known) if len(name) < _LONGEST else []
    row = foreign_flag(name)
    ours = next((flag for flag in row.ours.split() if flag in flags), None) if row is not None else None
    likeness = {flag: _likeness(plain_name(name).split("-"), plain_name(flag).split("-")) for flag in flags}
    best = ours or max(flags, key=lambda flag: likeness[flag], default="")
    return f", did you mean {best}?" if ours or likeness.get(best) else ""


def _likeness(words: list[str], others: list[str]) -> float:
    """How near two names are, 0 if they are not: as a whole, or because one has all words of the other."""
    whole = SequenceMatcher(None, "".join(words), "".join(others)).ratio()
    least = min(max(SequenceMatcher(None, word, other).ratio() for other in others) for word in words)
    is_part = least >= _ALIKE and 2 * len(words) > len(others)
    return whole if whole >= _ONE_NAME or is_part else 0.0


def answers(given: Iterable[tuple[str, str]], known: Iterable[str]) -> list[str]:
    """One line for each answer to unknown names: what to write instead, the name that is meant, or none.

    Args:
        given: flags or keys, as they were written, each with its value.
        known: the flags that are meant.
    """
    flags = list(known)
    named: dict[str, list[str]] = {}
    for name, value in dict.fromkeys(given):
        row, last = foreign_flag(name, value), name.rpartition(".")[2]
        own = f"--{plain_name(last)}"
        hint = f": use {own}, the same name" if own in flags else nearest_flag(last, flags) or _UNKNOWN
        named.setdefault(hint if row is None else f": {row.answer}", []).append(name)
    return [f"{', '.join(dict.fromkeys(names))}{said}" for said, names in named.items()]
