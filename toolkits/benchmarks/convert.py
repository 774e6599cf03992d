"""Measure the converter in both directions beside `cp`, until the program has ended and all is on the disk.

The clock starts after the imports, for a fair comparison with `cp`. A virtual machine returns freed memory to
its host after 2 s, and getting it back costs more than the copy. A converter that imports first would lose
the memory that removing the previous target has freed; `cp` would start at once and still have it.

    python -m toolkits.benchmarks convert [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from patch.storage.atomic import sync
from toolkits.benchmarks._report import Aim, Report, Rounds

_LAYERS, _QUICK_LAYERS = 16, 4
_SHAPE: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 65536, "tie_word_embeddings": True,
}  # fmt: skip
_WAYS = ("cp", "hf2mcore", "mcore2hf")
_COPY = ["sh", "-c", 'echo ready; read line; exec cp -r "$@"', "cp"]
_CONVERT = [
    sys.executable, "-W", "ignore", "-c",
    "import sys, patch.convert.offline, patch.data.chat_templates, patch.storage.hub, toolkits.convert; "
    "print('ready', flush=True); sys.stdin.readline(); sys.exit(toolkits.convert.main(sys.argv[1:]))",
]  # fmt: skip
"""Programs that wait for a line of input. The converter has done all its imports by then."""
ROUNDS = (5, 2)


def run(arguments: argparse.Namespace) -> Report:
    """Measure and report."""
    layers = _QUICK_LAYERS if arguments.quick else _LAYERS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # In a child process: Linux counts the parent's memory as memory of the programs that it starts.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as writer:
            writer.submit(_write_model, folder / "source", layers).result()
        size = sum(path.stat().st_size for path in (folder / "source").glob("*.safetensors"))
        seconds, peak_gib = _measure(folder, arguments.rounds)
    aims = [Aim(f"{way}: time / (cp + fsync)", seconds.ratio(way, _WAYS[0]), 1.8) for way in _WAYS[1:]]
    aims.append(Aim("peak memory, GiB", peak_gib, 1.5))
    head = f"{size / 2**30:.2f} GiB; peak memory {peak_gib:.2f} GiB\n"
    text = f"{head}\n{seconds.table(f'{arguments.rounds} rounds', _WAYS[0])}"
    content = {"bytes": size, "peak_gib": peak_gib, "rounds": seconds.values}
    return Report(text, aims, content)


def _write_model(folder: Path, layers: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **_SHAPE)).save_pretrained(
        folder, max_shard_size="1200MB"
    )


def _measure(folder: Path, rounds: int) -> tuple[Rounds, float]:
    """Return the times of all ways without the first round, and the peak of resident memory in GiB."""
    source, copy, mcore, back = (folder / name for name in ("source", "copy", "mcore", "back"))
    commands: list[tuple[list[str | Path], Path]] = [
        ([*_COPY, source, copy], copy),
        ([*_CONVERT, "hf2mcore", "--load", source, "--save", mcore], mcore),
        ([*_CONVERT, "mcore2hf", "--load", mcore, "--save", back], back),
    ]
    results = [[_time(*command) for command in commands] for _ in range(1 + rounds)][1:]
    seconds = {way: [found[place][0] for found in results] for place, way in enumerate(_WAYS)}
    return Rounds(seconds), max(peak_kib for found in results for _, peak_kib in found) / 2**20


def _time(command: list[str | Path], target: Path) -> tuple[float, int]:
    """Return the seconds until a waiting program has ended and its target is synced, and its peak memory in
    KiB. Before it begins, the previous target is removed and the page cache synced, to free memory."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdin and process.stdout
    ready = process.stdout.readline()
    assert ready == "ready\n", f"{command} said {ready!r}"
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    begin = time.perf_counter()
    process.stdin.write("\n")
    process.stdin.close()
    _, status, usage = os.wait4(process.pid, 0)
    for path in target.rglob("*"):
        sync(path)
    seconds = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stdout.close()
    assert process.returncode == 0, f"{command} ended with {process.returncode}"
    return seconds, usage.ru_maxrss
