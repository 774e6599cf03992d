"""Runs the GPU tests: each file in a process of its own, what tells most first, within a time limit.

    python tests/gpu/run.py [--limit 480] [--logs FOLDER] [--after results.json] [FILE...]

An illegal access poisons the CUDA context of its process, so each file has its own, and what fails in one
says nothing about another. The files of `FIRST` run one after the other: the machine itself, a layer of 8B's
shape. Alone run also those that look at the memory of the whole GPU or at the time of a copy. After them four
run at once, because most of their time is imports and the building of kernels, those that take long first:
training over all GPUs, runs through the shell.

FOLDER gets each file's output, and after each file results.json and report.md. A second call with the same
folder, or with `--after`, goes on: what has passed with this code on these GPUs is not run again. Exits with
1 if something failed or was not begun, or if no test ran at all.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import suppress
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from threading import Lock
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from patch.launch.agent import orphan_reaper
from patch.storage.atomic import write_atomically
from toolkits._program import run_program
from toolkits.benchmarks._report import versions

FIRST = ("test_doctor.py", "test_layer.py")
"""What tells most, in this order."""
ALONE = {*FIRST, "test_offload.py"}
"""They measure the whole GPU."""
LONG = ("test_nccl.py", "test_smoke.py", "test_training.py")
"""Of the others those that begin first, because they take longest."""
LIMIT, FILE_LIMIT = 480.0, 300
"""Seconds for all files, and for one."""
WORKERS = 4
RESULTS, REPORT, FIGURES = "results.json", "report.md", "GPU_CHECK_FIGURES"
"""The last is the variable with the file to which tests add figures (`figure` of conftest.py)."""


class Outcome(NamedTuple):
    """What came of a file's tests."""

    file: str
    code: int | None
    """pytest's exit code; 124: stopped at its limit; None: not begun."""
    seconds: float
    said: str
    """pytest's last line."""
    figures: list[list]
    """Name and value."""

    @property
    def num_passed(self) -> int:
        """Tests that passed."""
        return sum(map(int, re.findall(r"(\d+) passed", self.said)))

    @property
    def is_good(self) -> bool:
        """Whether its tests passed, or skipped themselves."""
        return self.code in (0, 5)

    @property
    def verdict(self) -> str:
        """One word."""
        if self.code is None:
            return "not begun"
        return ("passed" if self.num_passed else "skipped") if self.is_good else "FAILED"


def main() -> int:
    """Run the files; the outcomes come last, after the output of those that failed."""
    parser = argparse.ArgumentParser(prog="tests/gpu/run.py")
    parser.add_argument("--limit", type=float, default=LIMIT, help=f"seconds for all ({LIMIT:.0f})")
    parser.add_argument("--logs", type=Path, help="folder for the report and the output of each file")
    parser.add_argument("--after", type=Path, help=f"{RESULTS} of an earlier call, which this one goes on")
    parser.add_argument("files", nargs="*", help="names in tests/gpu (all)")
    arguments = parser.parse_args()
    files = in_order(arguments.files or [file.name for file in HERE.glob("test_*.py")])
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # at once, as by any other signal: what runs is killed
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # so that this process holds no GPU
        obstacle, under = pool.submit(probe).result()
    if obstacle:
        print(f"gpu-check: FAILED, nothing ran: {obstacle}")
        return 1
    logs = arguments.logs or Path(tempfile.mkdtemp(prefix="gpu-check-"))
    logs.mkdir(parents=True, exist_ok=True)
    before = passed_before(arguments.after or logs / RESULTS, under)
    outcomes = check(files, HERE, arguments.limit, logs, before, under)
    for outcome in outcomes:
        if outcome.verdict == "FAILED":
            print(f"==== {outcome.file}\n{log_of(logs, outcome.file).read_text(errors='replace')[-3000:]}")
    for outcome in outcomes:
        print(f"{outcome.file:<28} {outcome.verdict:<9} {outcome.seconds:4.0f} s  {outcome.said}")
    print(f"report: {logs / REPORT}")
    return exit_code(outcomes)


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """1 if something failed, was not begun, or nothing ran."""
    if not any(outcome.num_passed for outcome in outcomes):
        print("gpu-check: FAILED, no test ran; each says above why it was skipped")
        return 1
    return int(not all(outcome.is_good for outcome in outcomes))


def in_order(files: Sequence[str]) -> list[str]:
    """What tells most first, what runs alone, then long files before short ones, which fill the gaps."""
    places = [*FIRST, *sorted(ALONE - {*FIRST}), *LONG]
    return sorted(files, key=lambda file: (places.index(file) if file in places else len(places), file))


def check(
    files: Sequence[str],
    folder: Path,
    limit: float,
    logs: Path,
    before: Mapping[str, Outcome],
    under: Sequence[str],
) -> list[Outcome]:
    """Run files, in their order; those that passed before are not run again.

    Args:
        files: their names.
        folder: where they are.
        limit: seconds for all.
        logs: where their output goes, and after each file the results and the report.
        before: outcomes of an earlier call, by file.
        under: lines about code and machine.
    """
    end = time.monotonic() + limit
    found = {file: Outcome(file, None, 0.0, "not ended", []) for file in files} | before
    left = [file for file in files if file not in before]
    sessions: list[int] = []
    turn = Lock()

    def record(*outcomes: Outcome) -> None:
        found.update({outcome.file: outcome for outcome in outcomes})
        rows = [outcome._asdict() for outcome in found.values()]
        write_atomically(logs / RESULTS, json.dumps({"under": [*under], "outcomes": rows}, indent=1) + "\n")
        write_atomically(logs / REPORT, report(found.values(), under))

    record()
    with orphan_reaper() as watch, ThreadPoolExecutor(WORKERS) as pool:

        def started(session: int) -> None:
            with turn:
                sessions.append(session)
                watch(sessions)

        for file in (file for file in left if file in ALONE):
            record(run(folder / file, end, logs, started))
        rest = [file for file in left if file not in ALONE]
        for done in as_completed([pool.submit(run, folder / file, end, logs, started) for file in rest]):
            record(done.result())
    return [found[file] for file in files]


def run(file: Path, end: float, logs: Path, started: Callable[[int], None]) -> Outcome:
    """Run the tests of one file.

    Args:
        file: the file.
        end: when all must be over, by the monotonic clock.
        logs: where its output goes.
        started: gets the session in which it runs.
    """
    begin = time.monotonic()
    if begin >= end:
        return Outcome(file.name, None, 0.0, "the time was over", [])
    options = ["-m", "gpu", "-rfEs", "--tb=short", "--durations=5", "-p", "no:xdist"]
    figures = logs / f"{file.stem}.figures"
    figures.unlink(missing_ok=True)
    log = log_of(logs, file.name)
    with log.open("w") as output:
        ended = run_program(
            [sys.executable, "-m", "pytest", *options, str(file)], min(FILE_LIMIT, end - begin),
            os.environ | {"PYTHONUNBUFFERED": "1", FIGURES: str(figures)}, started,
            cwd=ROOT, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    code = 124 if ended.code is None else ended.code
    lines = re.findall(
        r"^[^\n]*\b(?:passed|failed|skipped|deselected|errors?)\b[^\n]* in [^\n]*$",
        log.read_text(errors="replace"),
        re.M,
    )
    said = lines[-1].strip("= ") if lines else f"ended with {code}"
    noted = [json.loads(line) for line in figures.read_text().splitlines()] if figures.exists() else []
    return Outcome(file.name, code, time.monotonic() - begin, said, noted)


def log_of(logs: Path, file: str) -> Path:
    """The output of a file's tests."""
    return logs / f"{Path(file).stem}.log"


def passed_before(results: Path, under: Sequence[str]) -> dict[str, Outcome]:
    """The files that passed in an earlier call, by their names; none where there was no such call.

    Args:
        results: of that call.
        under: lines about code and machine, which must be those of that call.
    """
    if not results.is_file():
        return {}
    told = json.loads(results.read_text())
    if told["under"] != [*under]:
        changed = [line.removeprefix("- ") for line in under if line not in told["under"]]
        print(f"gpu-check: {results} is not of {'; '.join(changed)}: all is run again")
        return {}
    outcomes = [Outcome(**row) for row in told["outcomes"]]
    return {outcome.file: outcome for outcome in outcomes if outcome.verdict == "passed"}


def subject(file: Path) -> str:
    """What a file's tests are about: the first line of its docstring."""
    return (ast.get_docstring(ast.parse(file.read_text())) or "").split("\n", 1)[0]


def report(outcomes: Collection[Outcome], under: Sequence[str]) -> str:
    """All of it for a reader who knows nothing of the suite, as Markdown.

    Args:
        outcomes: of the files.
        under: lines about code and machine.
    """
    head = ["| tests | outcome | seconds | |", "| --- | --- | --- | --- |"]
    lines = ["# What a GPU showed", "", *under, "", *head]
    for outcome in outcomes:
        about = subject(HERE / outcome.file) if (HERE / outcome.file).exists() else ""
        what = f"{about} {outcome.said}".strip()
        lines.append(f"| {outcome.file} | {outcome.verdict} | {outcome.seconds:.0f} | {what} |")
    figures = [(outcome.file, *figure) for outcome in outcomes for figure in outcome.figures]
    if figures:
        lines += ["", "| figure | value | of |", "| --- | --- | --- |"]
        lines += [f"| {name} | {value} | {file} |" for file, name, value in figures]
    return "\n".join(lines) + "\n"


def probe() -> tuple[str, list[str]]:
    """Why nothing can run here, "" if it can; and lines about code and machine."""
    import torch

    from patch.device import MachineFacts

    facts = MachineFacts.probe()
    if not facts.cuda_devices:
        return facts.unusable_gpus or "this machine has no GPU", []
    installed = (f"{name} {version}" for name, version in versions().items() if name != "commit")
    driver = Path("/proc/driver/nvidia/version")
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return "", [
        code_line(),
        f"- GPUs: {', '.join(gpus)}",
        f"- driver: {driver.read_text().splitlines()[0] if driver.exists() else 'not told'}",
        f"- CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, nccl_version()))}",
        f"- {', '.join(installed)}",
    ]


def nccl_version() -> tuple[int, ...]:
    """Return the version of the loaded NCCL; `torch.cuda.nccl.version()` is that of torch's build."""
    import torch

    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except OSError:  # NCCL is linked into torch
        return tuple(torch.cuda.nccl.version())
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def code_line() -> str:
    """The commit, and a digest of all programs, which a copy without git has too."""
    digest = sha256()
    for folder in ("patch", "tests", "toolkits", "examples"):
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in (".py", ".cpp", ".sh"):
                digest.update(f"{file.relative_to(ROOT)}".encode() + file.read_bytes())
    with suppress(OSError):
        commit = run_program(["git", "-C", str(ROOT), "rev-parse", "HEAD"], 10.0).output.strip()
        return f"- code: commit {commit or 'not told'}, files {digest.hexdigest()[:12]}"
    return f"- code: files {digest.hexdigest()[:12]}"


if __name__ == "__main__":
    sys.exit(main())
