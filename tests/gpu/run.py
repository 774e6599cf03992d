"""Runs the GPU tests: each file in a process of its own, what tells most first, within a time limit.

    python tests/gpu/run.py [--limit 480] [--logs FOLDER] [--after results.json] [--plan] [FILE...]

An illegal access poisons the CUDA context of its process, so each file has its own, and what fails in one
says nothing about another. The files of `FIRST` run one after the other: the machine itself, a layer of 8B's
shape, training over all GPUs. Alone run also those that look at the memory of the whole GPU or at the time of
a copy. After them four run at once, because most of their time is imports and the building of kernels.

FOLDER gets each file's output, results.json and report.md. A second call with the same folder, or with
`--after`, goes on: what has passed is not run again. Exits with 1 if something failed or was not begun, or if
no test ran at all.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distributions
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
FIRST = ("test_doctor.py", "test_layer.py", "test_all_gpus.py")
"""What tells most, in this order."""
ALONE = {*FIRST, "test_offload.py"}
"""They measure the whole GPU."""
SECONDS = {
    "test_doctor.py": 25, "test_layer.py": 45, "test_all_gpus.py": 75, "test_offload.py": 20,
    "test_host_waits.py": 15, "test_profiling.py": 15, "test_main_grad.py": 10,
    "test_context_parallel.py": 15,
    "test_packing.py": 20, "test_models.py": 15, "test_cuda_graphs.py": 25, "test_fp8.py": 25,
    "test_kernels.py": 45, "test_transformer_engine.py": 60, "test_alignment.py": 60, "test_adam.py": 60,
    "test_training.py": 90, "test_nccl.py": 120, "test_smoke.py": 230,
}  # fmt: skip
"""Estimates, never measured yet: they set the order, and what `--plan` says."""
FILE_LIMIT = 300
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
    from patch.device import MachineFacts

    parser = argparse.ArgumentParser(prog="tests/gpu/run.py")
    parser.add_argument("--limit", type=float, default=480.0, help="seconds for all (480)")
    parser.add_argument("--logs", type=Path, help="folder for the report and the output of each file")
    parser.add_argument("--after", type=Path, help=f"{RESULTS} of an earlier call, which this one goes on")
    parser.add_argument("--plan", action="store_true", help="print what would run, and for how long")
    parser.add_argument("files", nargs="*", help="names in tests/gpu (all)")
    arguments = parser.parse_args()
    files = in_order(arguments.files or [file.name for file in HERE.glob("test_*.py")])
    if arguments.plan:
        print("\n".join(f"{SECONDS.get(file, 0):4} s  {file:<28} {subject(HERE / file)}" for file in files))
        return 0
    facts = MachineFacts.probe()
    if not facts.cuda_devices:
        print(f"gpu-check: FAILED, nothing ran: {facts.unusable_gpus or 'this machine has no GPU'}")
        return 1
    logs = arguments.logs or Path(tempfile.mkdtemp(prefix="gpu-check-"))
    logs.mkdir(parents=True, exist_ok=True)
    before = passed_before(arguments.after or logs / RESULTS)
    outcomes = check(files, HERE, arguments.limit, logs, before)
    (logs / RESULTS).write_text(json.dumps([outcome._asdict() for outcome in outcomes], indent=1) + "\n")
    (logs / REPORT).write_text(report(outcomes, machine_lines()))
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
    """What tells most first, then cheap files before dear ones."""
    places = {file: place for place, file in enumerate(FIRST)}
    return sorted(files, key=lambda file: (places.get(file, len(FIRST)), SECONDS.get(file, 0), file))


def check(
    files: Sequence[str], folder: Path, limit: float, logs: Path, before: dict[str, Outcome]
) -> list[Outcome]:
    """Run files, in their order; those that passed before are not run again.

    Args:
        files: their names.
        folder: where they are.
        limit: seconds for all.
        logs: where their output goes.
        before: outcomes of an earlier call, by file.
    """
    end = time.monotonic() + limit
    todo = [file for file in files if file not in before]
    found = dict(before)
    for file in (file for file in todo if file in ALONE):
        found[file] = run(folder / file, end, logs)
    with ThreadPoolExecutor(WORKERS) as pool:
        rest = [file for file in todo if file not in ALONE]
        found |= zip(rest, pool.map(lambda file: run(folder / file, end, logs), rest), strict=True)
    return [found[file] for file in files]


def run(file: Path, end: float, logs: Path) -> Outcome:
    """Run the tests of one file.

    Args:
        file: the file.
        end: when all must be over, by the monotonic clock.
        logs: where its output goes.
    """
    begin = time.monotonic()
    if begin >= end:
        return Outcome(file.name, None, 0.0, "the time was over", [])
    options = ["-m", "gpu", "-rfEs", "--tb=short", "--durations=5", "-p", "no:xdist"]
    figures = logs / f"{file.stem}.figures"
    figures.unlink(missing_ok=True)
    log = log_of(logs, file.name)
    with log.open("w") as output:
        try:
            code = subprocess.run(
                [sys.executable, "-m", "pytest", *options, str(file)],
                cwd=HERE.parents[1], stdout=output, stderr=subprocess.STDOUT,
                timeout=min(FILE_LIMIT, end - begin), check=False,
                env=os.environ | {"PYTHONUNBUFFERED": "1", FIGURES: str(figures)},
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = 124
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


def passed_before(results: Path) -> dict[str, Outcome]:
    """The files that passed in an earlier call, by their names; none where there was no such call."""
    rows = json.loads(results.read_text()) if results.is_file() else []
    outcomes = [Outcome(**row) for row in rows]
    return {outcome.file: outcome for outcome in outcomes if outcome.verdict == "passed"}


def subject(file: Path) -> str:
    """What a file's tests are about: the first line of its docstring."""
    return (ast.get_docstring(ast.parse(file.read_text())) or "").split("\n", 1)[0]


def report(outcomes: Sequence[Outcome], machine: Sequence[str]) -> str:
    """All of it for a reader who knows nothing of the suite, as Markdown.

    Args:
        outcomes: of the files.
        machine: lines about the machine.
    """
    head = ["| tests | outcome | seconds | |", "| --- | --- | --- | --- |"]
    lines = ["# What a GPU showed", "", *machine, "", *head]
    for outcome in outcomes:
        about = subject(HERE / outcome.file) if (HERE / outcome.file).exists() else ""
        what = f"{about} {outcome.said}".strip()
        lines.append(f"| {outcome.file} | {outcome.verdict} | {outcome.seconds:.0f} | {what} |")
    figures = [(outcome.file, *figure) for outcome in outcomes for figure in outcome.figures]
    if figures:
        lines += ["", "| figure | value | of |", "| --- | --- | --- |"]
        lines += [f"| {name} | {value} | {file} |" for file, name, value in figures]
    return "\n".join(lines) + "\n"


def machine_lines() -> list[str]:
    """GPUs, driver and versions."""
    import torch

    names = ("torch", "megatron-core", "triton", "transformers", "transformer-engine", "flash-attn-3")
    installed = {each.name.lower().replace("_", "-"): each.version for each in distributions()}
    versions = ", ".join(f"{name} {installed[name]}" for name in names if name in installed)
    driver = Path("/proc/driver/nvidia/version")
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return [
        f"- GPUs: {', '.join(gpus)}",
        f"- driver: {driver.read_text().splitlines()[0] if driver.exists() else 'not told'}",
        f"- CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}",
        f"- {versions}; Python {sys.version.split()[0]}",
    ]


if __name__ == "__main__":
    sys.exit(main())
