"""Measures speed and memory of the converter in both directions, compared with `cp` of the same files.

The converter calls fsync before it renames the target; `cp` leaves this to the kernel. So each is timed
twice: without fsync, which the aims compare, and with fsync, which is then also called after `cp`.

python -m toolkits.benchmarks.convert [--quick] [--json FILE] [--plot FILE] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from toolkits.benchmarks._report import Aim, aim_lines, argument_parser, write_json

_ROUNDS, _QUICK_ROUNDS = 5, 2
_LAYERS, _QUICK_LAYERS = 16, 4
_SHAPE = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 65536, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
_FILES = 2
_WAYS = ("cp", "hf2mcore", "mcore2hf")


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report."""
    arguments = _parse(argv)
    if arguments.worker:
        return _work(*arguments.worker)
    rounds, layers = (_QUICK_ROUNDS, _QUICK_LAYERS) if arguments.quick else (_ROUNDS, _LAYERS)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        measured = _run_worker(folder, rounds, layers)
    aims = _aims(measured)
    gib = measured["bytes"] / 2**30
    print(f"{gib:.2f} GiB in {_FILES} files; peak memory {measured['peak_gib']:.2f} GiB")
    print(f"{'fastest of ' + str(rounds):14}{'GiB/s':>8}{'/ cp':>7}{'on disk':>10}{'/ cp':>7}")
    for way in _WAYS:
        columns = [
            f"{gib / _fastest(measured, way, until):{width}.2f}{_ratio(measured, way, until):7.2f}"
            for until, width in (("written", 8), ("on_disk", 10))
        ]
        print(f"{way:14}{''.join(columns)}")
    print("\n".join(aim_lines(aims)))
    if arguments.json:
        write_json(arguments.json, aims, **measured)
    _plot(measured, arguments.plot)
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argument_parser("convert", __doc__, "a quarter of the layers, fewer rounds")
    parser.add_argument("--folder", type=Path, help="folder for 8 GiB of temporary files (default: TMPDIR)")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _run_worker(folder: str, rounds: int, layers: int) -> dict[str, Any]:
    """Measure in a new process, whose memory peak is that of the converter."""
    _write_model(Path(folder) / "source", layers)
    command = [sys.executable, "-m", "toolkits.benchmarks.convert", "--worker", folder, str(rounds), "result"]
    subprocess.run(command, check=True)
    return json.loads((Path(folder) / "result").read_text())


def _write_model(folder: Path, layers: int) -> None:
    """Random weights in the form of a Hugging Face folder."""
    import torch
    from safetensors.torch import save_file

    from patch.convert.hf_config_files import model_of
    from patch.convert.weight_table import hf_tensors

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


def _work(folder_name: str, rounds: str, result: str) -> int:
    """Time all ways in each round; write the times in seconds and the peak of resident memory."""
    from patch.convert import hf_to_mcore, mcore_to_hf
    from patch.storage.atomic import sync

    folder = Path(folder_name)
    source, copy, mcore, back = (folder / name for name in ("source", "copy", "mcore", "back"))

    def copy_synced() -> None:
        subprocess.run(["cp", "-r", source, copy], check=True)
        for path in copy.iterdir():
            sync(path)

    ways: dict[str, tuple[Callable[[], Any], Path]] = {
        "cp": (copy_synced, copy),
        "hf2mcore": (lambda: hf_to_mcore(source, mcore, overwrite=True), mcore),
        "mcore2hf": (lambda: mcore_to_hf(mcore, back, overwrite=True), back),
    }
    measured = [{way: _seconds(*ways[way]) for way in _WAYS} for _ in range(1 + int(rounds))][1:]
    (line,) = [text for text in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in text]
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    content = {"bytes": size, "peak_gib": int(line.split()[1]) / 2**20, "rounds": measured}
    (folder / result).write_text(json.dumps(content))
    return 0


def _seconds(action: Callable[[], Any], target: Path) -> dict[str, float]:
    """Seconds of one action, without and with its calls of fsync.

    Before it starts, the disk cache is written out and the target of the previous round is removed, so that
    each way has the memory that it needs.
    """
    fsync, waited = os.fsync, 0.0

    def timed(descriptor: int) -> None:
        nonlocal waited
        begin = time.perf_counter()
        fsync(descriptor)
        waited += time.perf_counter() - begin

    os.sync()
    shutil.rmtree(target, ignore_errors=True)
    os.fsync = timed  # type: ignore[assignment]
    begin = time.perf_counter()
    try:
        action()
    finally:
        os.fsync = fsync
    total = time.perf_counter() - begin
    return {"written": total - waited, "on_disk": total}


def _fastest(measured: dict[str, Any], way: str, until: str) -> float:
    """Seconds of the fastest round: disturbances (other work, a virtual machine's host) only add time."""
    return min(times[way][until] for times in measured["rounds"])


def _ratio(measured: dict[str, Any], way: str, until: str) -> float:
    return _fastest(measured, way, until) / _fastest(measured, "cp", until)


def _aims(measured: dict[str, Any]) -> list[Aim]:
    """The aims: at most twice the time of `cp`, and 1.5 GiB of memory."""
    return [
        Aim("hf2mcore: time / cp's", _ratio(measured, "hf2mcore", "written"), 2.0),
        Aim("mcore2hf: time / cp's", _ratio(measured, "mcore2hf", "written"), 2.0),
        Aim("peak memory, GiB", measured["peak_gib"], 1.5),
    ]


def _plot(measured: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    gib = measured["bytes"] / 2**30
    figure, axes = pyplot.subplots(figsize=(5, 3.2), layout="constrained")
    for index, way in enumerate(_WAYS):
        speeds = [gib / times[way]["written"] for times in measured["rounds"]]
        axes.bar(index, statistics.median(speeds), color="lightsteelblue")
        axes.plot([index] * len(speeds), speeds, "k.", markersize=4)
    axes.set_xticks(range(len(_WAYS)), _WAYS)
    axes.set_ylabel("GiB/s")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
