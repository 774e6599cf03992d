"""`validate_run`: every rule of a run, checked before a process starts.

The rules are in rules.py (arithmetic), machines.py (fewer machines) and file_rules.py (folders and data).
"""

from __future__ import annotations

import re

from patch.config.file_rules import FILE_RULES, check_data, numerics_notes, tokenizer_notes
from patch.config.machines import fewer_machines_suffice
from patch.config.positions import refuse
from patch.config.rules import RULES, notes
from patch.config.schema import RunConfig
from patch.device import MachineFacts
from patch.parse_numbers import to_int


def profiled_steps(text: str | None) -> range | None:
    """The steps of START:END, both included and counted from 1; None: the text names none.

    Args:
        text: the value of --profile.
    """
    found = re.fullmatch(r"(\d+):(\d+)", text or "")
    first, last = (to_int(found[1]), to_int(found[2])) if found else (0, 0)
    return range(first, last + 1) if first and last and first <= last else None


def profile_names_steps(config: RunConfig, machine: MachineFacts) -> None:
    """--profile is START:END."""
    text = config.checkpoint.profile
    if text is not None and profiled_steps(text) is None:
        refuse("profile", text, "START:END, such as 10:12", "the first and the last step of the trace")


def validate_run(config: RunConfig, machine: MachineFacts) -> list[str]:
    """Check the whole configuration, then that the data files exist.

    Returns:
        One line for each value that has no effect or differs from the loaded model's. `run_warnings` returns
        what deserves a warning.

    Raises:
        ConfigError: a value cannot work; the message says got, expected and why.
        DataError: a data file is missing; raised only if the configuration itself is right.
    """
    for rule in (*RULES, fewer_machines_suffice, profile_names_steps, *FILE_RULES):
        rule(config, machine)
    check_data(config)
    return [*notes(config, machine), *numerics_notes(config), *tokenizer_notes(config)]
