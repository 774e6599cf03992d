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
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from toolkits.benchmarks._measure import ratio, take_turns
from toolkits.benchmarks._report import Aim, Panel, Report, run_benchmark, spread, table

_ROUNDS, _QUICK_ROUNDS = 3, 2
_SPEED_BYTES, _QUICK_SPEED_BYTES = 48 << 20, 6 << 20
_MEMORY_BYTES, _QUICK_MEMORY_BYTES = 1 << 30, 32 << 20
_PROCESSES = 2
_LENGTH = 4096
_SAMPLE_S = 0.2
_WORDS = "the of a in to is and that for it as was with be by on not he his but at are this have from".split()


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report."""
    return run_benchmark(
        "tokenise", __doc__, argv, _run, "fewer rows and rounds, no large file", _add_options
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer (default: trained here)")
    parser.add_argument("--data", type=Path, help="a JSON list of alpaca rows (default: generated rows)")
    parser.add_argument("--folder", type=Path, help="folder for 4 GB of temporary files (default: TMPDIR)")


def _run(arguments: argparse.Namespace) -> Report:
    rounds = _QUICK_ROUNDS if arguments.quick else _ROUNDS
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        rows = _rows(arguments.data)
        tokenizer = arguments.tokenizer or _make_tokenizer(folder / "tokenizer", rows)
        measured: dict[str, Any] = {"speed": _speed(folder, tokenizer, rows, rounds, arguments.quick)}
        measured |= _memory(folder, tokenizer, rows, arguments.quick)
    speeds = {way: speed["elapsed"] for way, speed in measured["speed"].items()}
    return Report(_text(measured), _aims(measured), [Panel("tokens/s", speeds)], measured)


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


def _make_tokenizer(folder: Path, rows: list[dict[str, str]]) -> Path:
    from toolkits.quickstart.seed_model import write_tokenizer

    write_tokenizer(folder, (text for row in rows for text in row.values()))
    return folder


def _speed(
    folder: Path, tokenizer: Path, rows: list[dict[str, str]], rounds: int, quick: bool
) -> dict[str, Any]:
    """Tokens per second of both, in turns, elapsed and of processor time; a missing rival is named."""
    path = _write_rows(folder / "speed.jsonl", rows, _QUICK_SPEED_BYTES if quick else _SPEED_BYTES)
    ways = ["ours", "datasets.map"] if find_spec("datasets") else ["ours"]
    found = take_turns({way: partial(_run_worker, way, path, tokenizer, folder) for way in ways}, rounds)
    return {
        way: {
            "elapsed": [one["tokens"] / one["seconds"] for one in results],
            "cpu": [one["tokens"] / one["cpu_seconds"] for one in results],
        }
        for way, results in found.items()
    }


def _memory(folder: Path, tokenizer: Path, rows: list[dict[str, str]], quick: bool) -> dict[str, Any]:
    """Peak memory of a large file, and the time of a second start."""
    path = _write_rows(folder / "memory.jsonl", rows, _QUICK_MEMORY_BYTES if quick else _MEMORY_BYTES)
    cache = folder / "large"
    first, second = (_run_worker("ours", path, tokenizer, folder, cache) for _ in range(2))
    return {"bytes": path.stat().st_size, "first": first, "second": second}


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
    measure = _ours if way == "ours" else _rival
    result.write_text(json.dumps(measure(rows, tokenizer, folder)))


def _ours(rows: Path, tokenizer: Any, folder: Path) -> dict[str, float]:
    from patch.data.sft.options import SftOptions
    from patch.data.sft.source import load_sft

    options = SftOptions(num_workers=_PROCESSES, cache_dir=folder, max_dropped_share=1.0)
    source, measured = _timed(lambda: load_sft(rows, tokenizer, _LENGTH, options))
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
    mapped, measured = _timed(
        lambda: read.map(tokenize, num_proc=_PROCESSES, remove_columns=read.column_names)
    )
    return {**measured, "tokens": sum(map(len, mapped["input_ids"]))}


def _timed(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What the work returns, and its time: elapsed, and that of the processors for it and its processes."""
    before, begin = os.times(), time.perf_counter()
    result = work()
    seconds, after = time.perf_counter() - begin, os.times()
    return result, {"seconds": seconds, "cpu_seconds": sum(after[:4]) - sum(before[:4])}


def _rival_over_ours(measured: dict[str, Any], kind: str) -> float:
    speed = measured["speed"]
    return ratio(speed["datasets.map"][kind], speed["ours"][kind])


def _aims(measured: dict[str, Any]) -> list[Aim]:
    """The aims: 1.5 times the rival's speed, 1 GiB of memory for 1 GiB of rows, 2 s for a second start."""
    aims = [
        Aim("peak memory, GiB", measured["first"]["peak_gib"], 1.0),
        Aim("second start, s", measured["second"]["seconds"], 2.0),
    ]
    if "datasets.map" in measured["speed"]:
        name = "datasets.map's tokens/s / ours"
        aims.insert(0, Aim(name, _rival_over_ours(measured, "elapsed"), 1 / 1.5))
    return aims


def _text(measured: dict[str, Any]) -> str:
    rows = [
        [way, *spread(speeds["elapsed"], 0), f"{median(speeds['cpu']):.0f}"]
        for way, speeds in measured["speed"].items()
    ]
    lines = [table(("tokens/s", "median", "quartiles", "of processor time"), rows)]
    if "datasets.map" in measured["speed"]:
        lines.append(f"ours / datasets.map in processor time: {1 / _rival_over_ours(measured, 'cpu'):.2f}")
    else:
        lines.append("datasets.map: missing (pip install datasets)")
    first = measured["first"]
    lines.append(
        f"{measured['bytes'] / 2**30:.2f} GiB of rows: {first['seconds']:.0f} s, "
        f"{first['tokens'] / 1e6:.0f} M tokens, peak memory {first['peak_gib']:.2f} GiB; "
        f"second start {measured['second']['seconds']:.2f} s"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
