"""Arguments of other programs: what to write here instead, or why nothing is needed, or that it is not there.

foreign_flags.txt is the one table of them: messages about unknown flags and keys of files come from it, and
the tables of docs/migrating.md are it, in both languages (`tests/architecture/test_guide_facts.py`).

Source: Pai-Megatron-Patch's scripts, Megatron-LLaMA's and Megatron-LM's arguments, BigScience's
Megatron-DeepSpeed, DeepSpeed's JSON, LLaMA-Factory's YAML, transformers, TRL, vLLM, torchrun.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import NamedTuple

_ALIKE = 0.75
"""From here on two words are one word, misspelled."""
_ONE_NAME = 0.85
"""The same for whole names, whose words may be joined otherwise."""
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
        """What to do, in a message."""
        return self.advice if self.ours == "-" else f"here {self.ours}: {self.advice}"

    def values(self, name: str) -> list[str]:
        """The values that the row has for a name: "" for any; empty if it has not the name."""
        found = []
        for part in self.theirs.split(", "):
            pattern, value = plain_name(part), re.split("[ :=]+", part, maxsplit=1)[1:]
            if fnmatchcase(plain_name(name), pattern):
                is_any = not value or (value[0].isupper() and value[0].isalpha())
                found.append("" if is_any else value[0])
        return found


@cache
def foreign_flags() -> dict[str, list[ForeignFlag]]:
    """Program -> its rows, in the order of docs/migrating.md."""
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
    """What the table has for another program's flag or key, best with this value; None if nothing."""
    rows = [row for rows in foreign_flags().values() for row in rows if row.values(name)]
    of_this_value = [row for row in rows if value and value in row.values(name)]
    of_any_value = [row for row in rows if "" in row.values(name)]
    return next(iter(of_this_value or of_any_value or rows), None)


def is_meant_otherwise(flag: str, value: str) -> bool:
    """Whether a flag that is known here is another one's, with this value, in a line of another program."""
    row = foreign_flag(flag, value)
    if row is None or flag in row.ours.split() or "*" in row.theirs:
        return False
    return value in row.values(flag) or ("" in row.values(flag) and f"{flag} " in row.theirs)


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
        row = foreign_flag(name, value)
        named.setdefault(nearest_flag(name, flags) if row is None else f": {row.answer}", []).append(name)
    return [f"{', '.join(dict.fromkeys(names))}{said}" for said, names in named.items()]
