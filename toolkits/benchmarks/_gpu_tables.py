"""Run the benchmarks that need a GPU, and append a section to RESULTS.md: date, hardware, versions, tables.

    python -m toolkits.benchmarks._gpu_tables [--parts gpu_step attention ...] [--folder FOLDER]

`make gpu-bench` calls it. Each part is written when it ends. If a part fails or reaches its time limit, the
next part runs. With --folder the section goes to FOLDER/RESULTS.md, with each part's JSON.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from patch.device import MachineFacts
from toolkits._program import run_program
from toolkits.benchmarks._report import machine, versions

_RESULTS = Path(__file__).with_name("RESULTS.md")
_TABLE = ["no offload", "auto", "1", "weights", "fp8", "fp8 auto", "fp8 1"]
_PARTS: dict[str, list[str]] = {
    "gpu_step": ["--sequence", "8192"],
    "offload": ["--sequence", "8192", "16384", "--contenders", *(f"ours: {name}" for name in _TABLE)]
    + ["upstream: 1", "DeepSpeed: 1"],
    "attention": [],
}
"""Benchmark -> its arguments, the most important benchmark first."""
_LIMIT_S = 570.0


def main(argv: Sequence[str]) -> int:
    """Run the parts; return 0, also without a GPU, or 1 if a part failed or reached its time limit."""
    parser = argparse.ArgumentParser(prog="gpu-bench", description="the tables of a GPU")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS), help="which (all)")
    parser.add_argument("--folder", type=Path, help="for the section and the JSON files")
    arguments = parser.parse_args(argv)
    gpu = MachineFacts.probe()
    if not gpu.cuda_devices:
        print("not run: needs a GPU, found none")
        return 0
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="gpu-bench-"))
    folder.mkdir(parents=True, exist_ok=True)
    end, code = time.monotonic() + _LIMIT_S, 0
    with ((arguments.folder or _RESULTS.parent) / _RESULTS.name).open("a", encoding="utf-8") as results:
        print(heading(gpu, time.strftime("%d %b %Y")), end="", file=results, flush=True)
        for name in arguments.parts:
            ended, output = run_part(name, folder, end - time.monotonic())
            for file in (results, sys.stdout):
                print(part_section(name, ended, output), end="", file=file, flush=True)
            code |= ended != 0
    print(f"written: {results.name}, {folder}")
    return int(code)


def heading(gpu: MachineFacts, date: str) -> str:
    """Return the head of the section.

    Args:
        gpu: this machine.
        date: today's date.
    """
    host, memory = machine(), gpu.cuda_memory_bytes / 2**30
    found = ", ".join(f"{name} {version}" for name, version in versions().items() if version != "missing")
    return (
        f"\n## on a GPU, {date}\n\n{gpu.cuda_devices} x {gpu.cuda_name} ({memory:.0f} GiB), "
        f"{host['cores']} cores of {host['cpu']},\nLinux {host['kernel']}; {found}.\n"
    )


def run_part(name: str, folder: Path, limit_s: float) -> tuple[int, str]:
    """Run a benchmark; return its exit code (124: time limit) and its output.

    Args:
        folder: where its JSON file is written.
    """
    command = [sys.executable, "-W", "ignore", "-m", "toolkits.benchmarks", name, "--quick"]
    command += ["--json", str(folder / f"{name}.json"), *_PARTS.get(name, [])]
    ended = run_program(command, limit_s, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return 124 if ended.code is None else ended.code, ended.output


def part_section(name: str, code: int, output: str) -> str:
    """Return the section of a part: its printed tables, or a line that it did not end."""
    state = {0: "", 124: " (did not end in time)"}.get(code, f" (ended with {code})")
    kept = [line for line in output.splitlines() if code or not line.startswith("ended: ")]
    return f"\n### {name}{state}\n\n" + "\n".join(kept).strip() + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
