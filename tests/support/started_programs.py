"""Programs that tests start in the background. At the end of a test the remaining ones are killed."""

import subprocess
from typing import Any

_started: list[subprocess.Popen] = []


def start_program(arguments: list[str], environment: dict[str, str], **streams: Any) -> subprocess.Popen:
    """Start a program with this environment; `streams` are arguments of `subprocess.Popen`."""
    _started.append(subprocess.Popen(arguments, env=environment, **streams))
    return _started[-1]


def kill_started() -> None:
    """Kill programs of a failed test. A launcher would wait for its workers, or for other machines."""
    while _started:
        with _started.pop() as process:
            process.kill()
