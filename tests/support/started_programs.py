"""Programs that tests start in the background; the end of a test kills those that are left."""

import subprocess
from typing import Any

_started: list[subprocess.Popen] = []


def start_program(arguments: list[str], environment: dict[str, str], **streams: Any) -> subprocess.Popen:
    """Start a program with these variables as its environment, and `subprocess.Popen`'s `streams`."""
    _started.append(subprocess.Popen(arguments, env=environment, **streams))
    return _started[-1]


def kill_started() -> None:
    """Kill what a failed test has left: a launcher would wait for its workers, or for other machines."""
    while _started:
        with _started.pop() as process:
            process.kill()
