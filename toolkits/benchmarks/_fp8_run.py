"""One training of the `fp8` benchmark, in a process of its own, whose argument is a task as JSON."""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from toolkits.quickstart.__main__ import losses, train
from toolkits.quickstart.exam import answer, exact_match_percent
from toolkits.quickstart.workspace import prepare

_NUM_QUESTIONS = 1000


@dataclass(frozen=True, kw_only=True)
class Fp8Task:
    """A whole quickstart on one process."""

    folder: str
    """To work in; files of an earlier quickstart in it are removed."""
    seed: int
    """Seed of data, weights and the data's order."""
    precision: str
    flags: tuple[str, ...]
    """Flags of the launcher, beside the precision."""


def measure(task: Fp8Task) -> dict[str, Any]:
    """Train, export, and question the exported model.

    Returns:
        `losses` of each step, `percent` of the answers that are right, `cpu_seconds` of the launcher.
    """
    disable_progress_bar()
    space, held_out = prepare(Path(task.folder).resolve(), _NUM_QUESTIONS, task.seed)
    code = train(space, task.precision, (*task.flags, "--seed", str(task.seed)), num_processes=1)
    if code != 0:
        raise SystemExit(f"{task.folder}: the training ended with exit code {code}")
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "losses": losses(space),
        "percent": exact_match_percent(answer(space.run / "hf", held_out)),
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
    }


if __name__ == "__main__":
    print(json.dumps(measure(Fp8Task(**json.loads(sys.argv[1])))))
