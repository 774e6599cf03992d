"""A program that forwards a run's metrics.jsonl to one service, in its own process and without torch.

    python -m patch.training.forwarder SERVICE OUTPUT_BASEPATH

`hooks/reporting.py` starts it. A service's library may raise, hang, print or end the process without harm to
training. log/reported/SERVICE.jsonl has a line for each record that the library took. A later forwarder
continues after the last line, also after a resume that repeats steps. If several forwarders serve one run and
service, the later forwarders wait for the first.

The end of stdin, or a byte on stdin, marks the end of the run: the rest is sent. A call of the library may
take HANG_S seconds, after the end FINISH_S; then SIGALRM ends the process, even if the library does not
return. stdout has lines for the run's log: the address of the run's page, failures, and at last DONE.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import re
import select
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from patch.storage.names import CONFIG_FILE, METRICS_FILE, REPORTED_FOLDER
from patch.storage.places import open_to_read
from patch.storage.text_files import parse_json, parse_yaml, read_small

HANG_S = 600
FINISH_S = 30
"""Seconds that a call of a library may take during the run (HANG_S) and after its end (FINISH_S)."""
DONE = "everything was sent"
FAILED = 70
"""The exit code after a reported failure; a library may end the process with other codes."""
_POLL_S = 1.0
_NICENESS = 5
"""Low priority, because the process may share a core with a training thread."""
_MOST_PARAMETERS = 100
"""mlflow's limit of parameters in one request."""
_UNTAKEN = re.compile(r"[^\w. /-]", re.ASCII)
"""Characters that mlflow refuses in a name, and the escape character ":"."""
_CREDENTIALS = re.compile(r"(\w+://)(?:[^/\s]*@)?([^\s?]*)(?:\?\S*)?")


class Target(NamedTuple):
    """The facts with which a service opens a run."""

    name: str
    """The name of the run's folder."""
    config: dict[str, Any]
    id: str
    is_new: bool
    """Whether nothing was ever sent; if so, `id` is only a proposal."""


class Service(NamedTuple):
    """An opened run of a service."""

    id: str
    page: str | None
    log: Callable[..., Any]
    """Function of a dict of values by name, and `step`."""
    close: Callable[[], Any]


def without_credentials(text: str) -> str:
    """Remove users, passwords and queries from the URLs in a text."""
    return _CREDENTIALS.sub(r"\1\2", text)


def _like_wandb(library: Any, run: Target, **more: str) -> Service:
    opened = library.init(config=run.config, resume="allow", **more)
    page = None
    with suppress(Exception):  # swanlab has no URL when offline
        page = opened.url
    return Service(run.id, page, opened.log, library.finish)


def _wandb(library: Any, run: Target) -> Service:
    return _like_wandb(library, run, name=run.name, id=run.id)


def _trackio(library: Any, run: Target) -> Service:
    # trackio identifies a run by its name, and folders of several runs may have the same name.
    project = os.environ.get("TRACKIO_PROJECT", "llama-megatron-patch")  # as transformers reads it
    return _like_wandb(library, run, name=f"{run.name}-{run.id[:8]}", project=project)


def _written(character: re.Match[str]) -> str:
    """Escape a character that mlflow refuses, such as ":2c:", so that different names stay different."""
    return f":{ord(character[0]):x}:"


def _mlflow(library: Any, run: Target) -> Service:
    opened = library.start_run(run_id=None if run.is_new else run.id, run_name=run.name)
    items = list(run.config.items()) if run.is_new else []  # mlflow's parameters cannot change
    for first in range(0, len(items), _MOST_PARAMETERS):
        library.log_params(dict(items[first : first + _MOST_PARAMETERS]))

    def log(values: dict[str, float], step: int) -> None:
        named = {_UNTAKEN.sub(_written, name): value for name, value in values.items()}
        library.log_metrics(named, step=step)

    return Service(opened.info.run_id, None, log, library.end_run)


_OPEN = {"wandb": _wandb, "mlflow": _mlflow, "swanlab": _wandb, "trackio": _trackio}


def _config(output: Path) -> dict[str, Any]:
    """Return the run's config.yaml as `section.field`, without secrets."""
    sections = parse_yaml(read_small(output / CONFIG_FILE).decode())
    return {
        f"{section}.{name}": without_credentials(value) if isinstance(value, str) else value
        for section, fields in sections.items()
        for name, value in fields.items()
    }


def _complete_lines(file: IO[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the objects of the lines that are new since the last call."""
    while (line := file.readline()).endswith(b"\n"):
        with suppress(ValueError):  # a line that a full disk cut short
            yield parse_json(line)
    file.seek(-len(line), os.SEEK_CUR)


def _forward(name: str, output: Path, reported: IO[bytes], tell: Callable[[str], Any]) -> None:
    reported.seek(0)
    *_, last = {"id": uuid.uuid4().hex[:21], "sent": None}, *_complete_lines(reported)
    target = Target(output.name, _config(output), last["id"], last["sent"] is None)
    service = _OPEN[name](importlib.import_module(name), target)
    if service.page:
        tell(service.page)
    sent, position, is_over = tuple(last["sent"] or (0, 0)), (0, 0), False
    with open_to_read(output / METRICS_FILE) as file:
        while not is_over:
            is_over = bool(select.select([sys.stdin], [], [], _POLL_S)[0])  # the loop below reads all records
            limit_s = FINISH_S if is_over else HANG_S
            signal.alarm(limit_s)
            for record in _complete_lines(file):
                step = record.pop("iteration")
                position = (step, position[1] + 1 if step == position[0] else 1)
                if position > sent:
                    values = {key: float(value) for key, value in record.items() if value is not None}
                    service.log(values, step=step)
                    reported.write(json.dumps({"id": service.id, "sent": position}).encode() + b"\n")
                    reported.flush()
                    signal.alarm(limit_s)
    service.close()
    tell(DONE)


def main(name: str, folder: str) -> int:
    """Send the metrics to the service until the run ends; return 0, or FAILED after an error."""
    os.nice(_NICENESS)
    signal.alarm(HANG_S)
    answer, output = os.dup(1), Path(folder)
    os.environ["GIT_CEILING_DIRECTORIES"] = str(output.parent)  # else swanlab sends a checkout's URL as it is
    os.dup2(2, 1)  # the library's prints go to stderr, which is /dev/null

    def tell(text: str) -> None:
        os.write(answer, without_credentials(" ".join(text.split()))[:1000].encode() + b"\n")

    try:
        with (output / REPORTED_FOLDER / f"{name}.jsonl").open("a+b") as reported:
            with suppress(OSError):  # some network file systems have no locks
                fcntl.flock(reported, fcntl.LOCK_EX)
            _forward(name, output, reported, tell)
    except BaseException as error:  # noqa: BLE001 - libraries call sys.exit, too
        tell(repr(error))
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
