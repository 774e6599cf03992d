"""Runs the GPU tests: each file in a process of its own, cheap ones first, within a time limit.

    python tests/gpu/run.py [--limit 480] [--logs FOLDER] [FILE...]

An illegal access poisons the CUDA context of its process, so each file has its own, and what fails in one
says nothing about another. Files that look at the memory of the whole GPU or at the time of a copy run alone;
after them four run at once, because most of their time is imports and the building of kernels. What was not
begun within the limit is named. Exits with 1 if something failed or was not begun.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ALONE = {"test_offload.py"}
"""They measure the whole GPU."""
SECONDS = {
    "test_offload.py": 20, "test_context_parallel.py": 15, "test_packing.py": 20,
    "test_models.py": 15, "test_fp8.py": 25, "test_alignment.py": 60, "test_adam.py": 60,
    "test_training.py": 90, "test_nccl.py": 120, "test_smoke.py": 230,
}  # fmt: skip
"""Estimates, which only set the order; a file that is not here is taken for the cheapest."""
FILE_LIMIT = 300
WORKERS = 4


class Outcome(NamedTuple):
    """What came of a file's tests."""

    file: str
    code: int | None
    """pytest's exit code; 124: stopped at its limit; None: not begun."""
    seconds: float
    output: str

    @property
    def is_good(self) -> bool:
        """Whether its tests passed, or skipped themselves."""
        return self.code in (0, 5)

    def line(self) -> str:
        """One line of text."""
        if self.code is None:
            return f"{self.file:<28} not begun: the time was over"
        found = re.findall(
            r"^[^\n]*\b(?:passed|failed|skipped|error|errors)\b[^\n]* in [^\n]*$", self.output, re.M
        )
        said = found[-1].strip("= ") if found else f"ended with {self.code}"
        return f"{self.file:<28} {'ok  ' if self.is_good else 'FAIL'} {self.seconds:4.0f} s  {said}"


def main() -> int:
    """Run the files; the outcomes come last, after the output of those that failed."""
    parser = argparse.ArgumentParser(prog="tests/gpu/run.py")
    parser.add_argument("--limit", type=float, default=480.0, help="seconds for all (480)")
    parser.add_argument("--logs", type=Path, help="folder for the whole output of each file")
    parser.add_argument("files", nargs="*", help="names in tests/gpu (all)")
    arguments = parser.parse_args()
    files = sorted(
        arguments.files or [f.name for f in HERE.glob("test_*.py")], key=lambda f: SECONDS.get(f, 0)
    )
    end = time.monotonic() + arguments.limit
    logs = arguments.logs or Path(tempfile.mkdtemp(prefix="gpu-check-"))
    logs.mkdir(parents=True, exist_ok=True)
    outcomes = [run(file, end, logs) for file in files if file in ALONE]
    with ThreadPoolExecutor(WORKERS) as pool:
        outcomes += pool.map(lambda file: run(file, end, logs), [f for f in files if f not in ALONE])
    for outcome in outcomes:
        if not outcome.is_good:
            print(f"==== {outcome.file}\n{outcome.output[-3000:]}")
    print("\n".join(outcome.line() for outcome in outcomes), f"\nlogs: {logs}")
    return int(not all(outcome.is_good for outcome in outcomes))


def run(file: str, end: float, logs: Path) -> Outcome:
    """Run the tests of one file.

    Args:
        file: its name in this folder.
        end: when all must be over, by the monotonic clock.
        logs: where its output goes.
    """
    begin = time.monotonic()
    if begin >= end:
        return Outcome(file, None, 0.0, "")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-rfEs",
        "--tb=short",
        "--durations=5",
        "-p",
        "no:xdist",
    ]
    log = logs / f"{Path(file).stem}.log"
    with log.open("w") as output:
        try:
            code = subprocess.run(
                [*command, str(HERE / file)], cwd=HERE.parents[1], stdout=output, stderr=subprocess.STDOUT,
                timeout=min(FILE_LIMIT, end - begin), check=False, env=os.environ | {"PYTHONUNBUFFERED": "1"},
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = 124
    return Outcome(file, code, time.monotonic() - begin, log.read_text(errors="replace"))


if __name__ == "__main__":
    sys.exit(main())
