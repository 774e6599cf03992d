"""`validate_run`: every rule of a run, checked before a process starts.

The rules are in rules.py (arithmetic), machines.py (fewer machines) and file_rules.py (folders and data).
"""

from __future__ import annotations

from patch.config.file_rules import FILE_RULES, check_data, numerics_notes, tokenizer_notes
from patch.config.machines import fewer_machines_suffice
from patch.config.profiled_steps import profile_names_steps
from patch.config.rules import RULES, notes
from patch.config.schema import RunConfig
from patch.device import MachineFacts


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
