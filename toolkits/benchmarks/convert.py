"""Measures the converter in both directions beside `cp`, until the program has ended and all is on the disk.

The clock starts when the program has its imports, because a virtual machine hands freed memory back to its
host after 2 s, and taking it again costs more than the copy: `cp`, which starts at once after the target of
the round before was removed, would keep what a converter that imports first has lost.

python -m toolkits.benchmarks.convert [--quick] [--json FILE] [--plot FILE] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from patch.storage.atomic import sync
from toolkits.benchmarks._measure import Columns, Rounds
from toolkits.benchmarks._report import Aim, Report, run_benchmark

_LAYERS, _QUICK_LAYERS = 16, 4
_SHAPE = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 65536, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
_FILES = 2
_WAYS = ("cp", "hf2mcore", "mcore2hf")
_COPY = ["sh", "-c", 'echo ready; read line; exec cp -r "$@"', "cp"]
_CONVERT = [
    sys.executable, "-W", "ignore", "-c",
    "import sys, patch.convert; from toolkits import convert; print('ready', flush=True); "
    "sys.stdin.readline(); sys.exit(convert.main(sys.argv[1:]))",
]  # fmt: skip
"""Programs that begin when they get a line."""


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report."""
    folder = {"type": Path, "help": "folder for 8 GiB of temporary files (default: TMPDIR)"}
    quick = "a quarter of the layers, fewer rounds"
    return run_benchmark(_run, argv, rounds=(5, 2), quick=quick, options={"--folder": folder})


def _run(arguments: argparse.Namespace) -> Report:
    layers = _QUICK_LAYERS if arguments.quick else _LAYERS
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        writer = multiprocessing.get_context("spawn").Process(
            target=_write_model, args=(folder / "source", layers)
        )  # Linux counts the memory of the process that starts a program as the program's
        writer.start()
        writer.join()
        size = sum(path.stat().st_size for path in (folder / "source").glob("*.safetensors"))
        seconds, peak_gib = _measure(folder, arguments.rounds)
    aims = [Aim(f"{way}: time / (cp + fsync)", seconds.ratio(way, _WAYS[0]), 1.8) for way in _WAYS[1:]]
    aims.append(Aim("peak memory, GiB", peak_gib, 1.5))
    ends: Columns = {
        "least": lambda way: f"{min(seconds.values[way]):.2f}",
        "most": lambda way: f"{max(seconds.values[way]):.2f}",
    }
    head = f"{size / 2**30:.2f} GiB in {_FILES} files; peak memory {peak_gib:.2f} GiB\n"
    text = f"{head}\n{seconds.table(f'{arguments.rounds} rounds', _WAYS[0], ends)}"
    content = {"bytes": size, "peak_gib": peak_gib, "rounds": seconds.values}
    return Report(text, aims, [seconds.panel()], content)


def _write_model(folder: Path, layers: int) -> None:
    """Random weights in the form of a Hugging Face folder."""
    import torch
    from safetensors.torch import save_file

    from patch.convert.hf_config_files import model_of
    from patch.families.adapters import hf_tensors

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_SHAPE | {"num_hidden_layers": layers}))
    tensors = hf_tensors(model_of(folder))
    layout: dict[str, str] = {}
    for number in range(_FILES):
        name = f"model-{number + 1:05d}-of-{_FILES:05d}.safetensors"
        of_file = tensors[number::_FILES]
        bits = {t.name: torch.randint(-(2**15), 2**15, t.shape, dtype=torch.int16) for t in of_file}
        save_file({key: value.view(torch.bfloat16) for key, value in bits.items()}, folder / name)
        layout |= dict.fromkeys(bits, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": layout}))


def _measure(folder: Path, rounds: int) -> tuple[Rounds, float]:
    """Times of all ways, without the first round, and the largest peak of resident memory in GiB."""
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
    """Seconds until a program that waits has ended and its target is on the disk; its peak of memory in KiB.

    Before it begins, the disk cache is written out and the target of the previous round is removed, so that
    each way has the memory that it needs.
    """
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
