"""The steps that --profile names."""

from __future__ import annotations

import re

from patch.config.refusal import refuse
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
