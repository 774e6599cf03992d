"""Compares the tokenizing of chat rows with `datasets.map`, and measures memory and a second start.

Both get the same rows, tokenizer and chat template and two processes, and take turns, each time in a new
process. The rival does what is usual: `apply_chat_template` for each row in a function for `datasets.map`. It
makes ids alone; ours also makes loss masks, and writes the token cache.

python -m toolkits.benchmarks.tokenise [--quick] [--json FILE] [--plot FILE] [--tokenizer FOLDER]
                                       [--data FILE] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from toolkits.benchmarks._measure import Columns, Rounds, take_turns
from toolkits.benchmarks._report import Aim, Report, run_benchmark
from toolkits.quickstart.seed_model import write_tokenizer

_BYTES, _QUICK_BYTES = (48 << 20, 1 << 30), (6 << 20, 32 << 20)
"""Of the rows for speed, and of those for memory."""
_PROCESSES = 2
OURS, RIVAL = "ours", "datasets.map"
_LENGTH = 4096
_SAMPLE_S = 0.2
_WORDS = "the of a in to is and that for it as was with be by on not he his but at are this have from".split()


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report."""
    options: dict[str, dict[str, Any]] = {
        "--tokenizer": {"type": Path, "help": "folder of a tokenizer (default: trained here)"},
        "--data": {"type": Path, "help": "a JSON list of alpaca rows (default: generated rows)"},
        "--folder": {"type": Path, "help": "folder for 4 GB of temporary files (default: TMPDIR)"},
    }
    quick = "fewer rows and rounds, no large file"
    return run_benchmark(_run, argv, rounds=(3, 2), quick=quick, options=options)


def _run(arguments: argparse.Namespace) -> Report:
    ways = (OURS, RIVAL) if find_spec("datasets") else (OURS,)
    small, large = _QUICK_BYTES if arguments.quick else _BYTES
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder, rows = Path(name), _rows(arguments.data)
        tokenizer = arguments.tokenizer or folder / "tokenizer"
        if not arguments.tokenizer:
            write_tokenizer(tokenizer, (text for row in rows for text in row.values()))
        path = _write_rows(folder / "speed.jsonl", rows, small)
        timed = {way: partial(_run_worker, way, path, tokenizer, folder) for way in ways}
        found = take_turns(timed, arguments.rounds)
        path = _write_rows(folder / "memory.jsonl", rows, large)
        num_bytes = path.stat().st_size
        first, second = (_run_worker(OURS, path, tokenizer, folder, folder / "large") for _ in range(2))
    elapsed, processor = (
        {way: [one["tokens"] / one[key] for one in of_way] for way, of_way in found.items()}
        for key in ("seconds", "cpu_seconds")
    )
    speeds = Rounds(elapsed, "tokens/s", 0)
    columns: Columns = {"of processor time": lambda way: f"{median(processor[way]):.0f}"}
    aims = [
        Aim("peak memory, GiB", first["peak_gib"], 1.0),
        Aim("second start, s", second["seconds"], 2.0),
    ]
    lines = [speeds.table("", OURS, columns)]
    if RIVAL in ways:
        aims.insert(0, Aim(f"{RIVAL}'s tokens/s / ours", speeds.ratio(RIVAL, OURS), 1 / 1.5))
    else:
        lines.append(f"{RIVAL}: missing (pip install datasets)")
    lines.append(
        f"{num_bytes / 2**30:.2f} GiB of rows: {first['seconds']:.0f} s, {first['tokens'] / 1e6:.0f} M "
        f"tokens, peak memory {first['peak_gib']:.2f} GiB; second start {second['seconds']:.2f} s"
    )
    speed = {way: {"elapsed": elapsed[way], "cpu": processor[way]} for way in ways}
    content = {"speed": speed, "bytes": num_bytes, "first": first, "second": second}
    return Report("\n".join(lines), aims, [speeds.panel()], content)


def _rows(data: Path | None, count: int = 1000) -> list[dict[str, str]]:
    """The rows of a file, or generated ones: a question and an answer of some sentences."""
    if data is not None:
        return json.loads(data.read_text(encoding="utf-8"))
    pick = random.Random(0)

    def text(count: int) -> str:
        words = (pick.choice(_WORDS) for _ in range(count))
        return " ".join(word if pick.random() < 0.95 else f"{word}{pick.randrange(1000)}" for word in words)

    return [{"instruction": text(20), "output": text(pick.randrange(20, 200))} for _ in range(count)]


def _write_rows(path: Path, rows: list[dict[str, str]], size: int) -> Path:
    """Write the rows again and again, each time with another number, as JSONL of `size` bytes or more."""
    written = repeat = 0
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            for row in rows:
                written += file.write(
                    json.dumps({**row, "instruction": f"{repeat} {row['instruction']}"}) + "\n"
                )
            repeat += 1
    return path


def _run_worker(
    way: str, rows: Path, tokenizer: Path, folder: Path, cache: Path | None = None
) -> dict[str, Any]:
    """Tokenize in a new process, with a new cache if none is given; with the peak memory of its processes."""
    result, cache = folder / "result.json", cache or Path(tempfile.mkdtemp(dir=folder))
    worker = multiprocessing.get_context("spawn").Process(
        target=_work, args=(way, rows, tokenizer, cache, result)
    )
    worker.start()
    assert worker.pid is not None
    peak = 0
    while worker.is_alive():
        peak = max(peak, _tree_bytes(worker.pid))
        time.sleep(_SAMPLE_S)
    if worker.exitcode:
        raise RuntimeError(f"{way}: a process ended with {worker.exitcode}")
    return {**json.loads(result.read_text()), "peak_gib": peak / 2**30}


def _tree_bytes(pid: int) -> int:
    """Memory of a process and its children; what they share counts once (PSS)."""
    import psutil

    total = 0
    try:
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
            total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    except (psutil.Error, OSError, ValueError):
        pass  # one has ended meanwhile
    return total


def _work(way: str, rows: Path, tokenizer_folder: Path, folder: Path, result: Path) -> None:
    from patch.data.chat_templates import ensure_chat_template
    from patch.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(tokenizer_folder))
    ensure_chat_template(tokenizer)
    measure = _ours if way == OURS else _rival
    result.write_text(json.dumps(measure(rows, tokenizer, folder)))


def _ours(rows: Path, tokenizer: Any, folder: Path) -> dict[str, float]:
    from patch.data.sft.options import SftOptions
    from patch.data.sft.source import load_sft

    options = SftOptions(num_workers=_PROCESSES, cache_dir=folder, max_dropped_share=1.0)
    with _timed() as measured:
        source = load_sft(rows, tokenizer, _LENGTH, options)
    return {**measured, "tokens": source.report.tokens}


def _rival(rows: Path, tokenizer: Any, folder: Path) -> dict[str, float]:
    """Time `map` alone: that the rows are read from JSON before is not counted."""
    import datasets

    def tokenize(row: dict[str, str]) -> dict[str, list[int]]:
        prompt = row["instruction"] + (f"\n{row['input']}" if row.get("input") else "")
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": row["output"]}]
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
        return {"input_ids": ids[: _LENGTH + 1]}

    datasets.disable_progress_bars()
    read = datasets.Dataset.from_json(str(rows), cache_dir=str(folder))
    with _timed() as measured:
        mapped = read.map(tokenize, num_proc=_PROCESSES, remove_columns=read.column_names)
    return {**measured, "tokens": sum(map(len, mapped["input_ids"]))}


@contextmanager
def _timed() -> Iterator[dict[str, float]]:
    """The time of what is done within: elapsed, and that of the processors for it and its processes."""
    measured: dict[str, float] = {}
    before, begin = os.times(), time.perf_counter()
    yield measured
    seconds, after = time.perf_counter() - begin, os.times()
    measured |= {"seconds": seconds, "cpu_seconds": sum(after[:4]) - sum(before[:4])}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
