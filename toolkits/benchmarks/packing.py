"""Measures how much faster packed fine-tuning learns than padded fine-tuning, on a real data set.

    python -m toolkits.benchmarks.packing [--data FILE] [--pad-len N] [--quick] [--json FILE] [--plot FILE]

Two trainers in one process take steps in turn: one with a conversation in each row, one with packs. Both see
the set in its shuffled order.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from patch.config.schema import RunConfig
from patch.data import BatchReader, SampleSource, load_sft, load_tokenizer
from patch.data.packing import PackedSource, PackingSummary, pack
from patch.device import DeviceContext
from patch.distributed.groups import initialize
from toolkits.benchmarks._contenders import OurTrainer, run_config
from toolkits.benchmarks._measure import Columns, Rounds, Seconds, take_turns, time_call
from toolkits.benchmarks._report import Aim, NotRunError, Report, run_benchmark
from toolkits.benchmarks._runner import job
from toolkits.quickstart.seed_model import write_tokenizer

_DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "alpaca_en_demo.json"
_VOCAB_SIZE = 4096
_ROWS = 4
"""Rows of a step, in micro-batches of two."""
_LEAST_GAIN = 0.95
"""The least gain of the learned tokens per second, as a share of the gain in slots."""
PADDED, PACKED = "padded", "packed"


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report."""
    options: dict[str, dict[str, Any]] = {
        "--data": {"type": Path, "default": _DATA, "help": "alpaca rows, one JSON list"},
        "--pad-len": {"type": int, "default": 1024, "help": "tokens of a row, padding included"},
    }
    return run_benchmark(_run, argv, rounds=(25, 5), options=options)


def _run(arguments: argparse.Namespace) -> Report:
    if not arguments.data.is_file():
        raise NotRunError(f"no data at {arguments.data}; give alpaca rows in one JSON list with --data")
    with tempfile.TemporaryDirectory() as folder:
        source = _tokenize(arguments.data, Path(folder), arguments.pad_len)
        packs = pack(source.sizes, arguments.pad_len)
        summary = PackingSummary.of(source, packs)
        print(f"{arguments.data.name}: {summary}\n", flush=True)
        sources = {PADDED: source, PACKED: PackedSource(source, packs)}
        rounds = _measure(sources, arguments.pad_len, arguments.rounds)
    learned = {name: _ROWS * summary.num_learned / len(rows) for name, rows in sources.items()}
    speeds = Rounds(
        {name: [learned[name] / seconds.wall for seconds in found] for name, found in rounds.items()},
        unit="learned tokens/s", digits=0,
    )  # fmt: skip
    gain = speeds.ratio(PACKED, PADDED)
    columns: Columns = {
        "ms a step": lambda name: f"{1e3 * median(step.wall for step in rounds[name]):.0f}",
        "CPU ms": lambda name: f"{1e3 * median(step.cpu for step in rounds[name]):.0f}",
    }
    lost = 1 - gain / summary.gain
    aims = [Aim("share of the gain in slots that the step's time costs", lost, 1 - _LEAST_GAIN)]
    ideal = {"padded x gain in slots": median(speeds.values[PADDED]) * summary.gain}
    said = f"gain in learned tokens/s: {gain:.2f} (slots: {summary.gain:.2f})"
    content = {"rounds": rounds, "summary": str(summary), "lost": lost}
    return Report(f"{speeds.table('', PADDED, columns)}\n{said}", aims, [speeds.panel(marks=ideal)], content)


def _tokenize(data: Path, folder: Path, pad_len: int) -> Any:
    """The set, with a tokenizer that is trained on it."""
    rows = json.loads(data.read_text(encoding="utf-8"))
    texts = (row.get(key, "") for row in rows for key in ("instruction", "input", "output"))
    write_tokenizer(folder, texts, _VOCAB_SIZE)
    return load_sft(data, load_tokenizer(str(folder)), sequence_length=pad_len)


def _packing_run(pad_len: int, cuda: bool) -> RunConfig:
    """The run of both trainers: small on a CPU, of the width of a 1B model on a GPU."""
    width = 2048 if cuda else 256
    return run_config(
        pad_len, num_layers=4, hidden_size=width, ffn_hidden_size=width * 11 // 4, kv_channels=64,
        num_attention_heads=width // 64, num_query_groups=width // 128, vocab_size=_VOCAB_SIZE,
        micro_batch_size=2, global_batch_size=_ROWS, sft=True, precision="bf16" if cuda else "fp32",
    )  # fmt: skip


def _measure(sources: Mapping[str, SampleSource], pad_len: int, num_rounds: int) -> dict[str, list[Seconds]]:
    """One step of each trainer in each round."""
    context = DeviceContext.select(0)
    config = _packing_run(pad_len, context.is_cuda)
    with job(context):
        groups = initialize(config, context)
        steps = {
            name: OurTrainer(config, groups, context.device, _reader(source)).step
            for name, source in sources.items()
        }
        for step in steps.values():
            step()
        return take_turns(
            {name: partial(time_call, step, context) for name, step in steps.items()}, num_rounds
        )


def _reader(source: SampleSource) -> BatchReader:
    return BatchReader(
        source, micro_batch_size=2, global_batch_size=_ROWS, dp_rank=0, dp_size=1, seed=1, shuffle=True
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
