"""Runs a part of a benchmark in a process of its own: its memory, its settings of torch, its crash."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


class Outcome(NamedTuple):
    """What came of the process."""

    measured: dict[str, Any] | None
    """What it printed as JSON in its last line; None if it failed."""
    error: str
    """The last line of its error; "" if it did not fail."""


@dataclass(frozen=True, kw_only=True)
class StepsTask:
    """Training steps that a process times. Its module's own class, because `run_task` runs that module."""

    contender: str
    layers: int
    sequence: int
    steps: int
    """Number of timed steps."""


def run_task(task: Any, timeout_s: float, environment: Mapping[str, str] | None = None) -> Outcome:
    """Run the module of a dataclass with its fields as JSON on the command line; say on stderr if it failed.

    Args:
        task: a dataclass, whose module prints a JSON object in its last line.
        timeout_s: limit in seconds.
        environment: of the process; None: this one's.
    """
    command = [sys.executable, "-W", "ignore", "-m", type(task).__module__, json.dumps(asdict(task))]
    env = None if environment is None else dict(environment)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False, env=env
        )
        error = (done.stderr.strip().splitlines() or ["no message"])[-1] if done.returncode else ""
    except subprocess.TimeoutExpired:
        error = f"took over {timeout_s:.0f} s"
    if error:
        print(f"failed: {task}: {error}", file=sys.stderr)
        return Outcome(None, error)
    return Outcome(json.loads(done.stdout.strip().splitlines()[-1]), "")
