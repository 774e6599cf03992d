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
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from patch.config.schema import RunConfig
from patch.data import BatchReader, SampleSource, load_sft, load_tokenizer
from patch.data.packing import PackedSource, PackingSummary, pack
from patch.device import DeviceContext
from patch.distributed.groups import initialize
from toolkits.benchmarks._contenders import OurTrainer
from toolkits.benchmarks._rank import Seconds, job, time_call
from toolkits.benchmarks._report import Aim, aim_lines, argument_parser, write_json
from toolkits.benchmarks._run_config import llama, run_config
from toolkits.quickstart.seed_model import write_tokenizer

_DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "alpaca_en_demo.json"
_VOCAB_SIZE = 4096
_ROWS = 4
"""Rows of a step, in micro-batches of two."""
_ROUNDS, _QUICK_ROUNDS = 25, 5
_LEAST_GAIN = 0.95
"""The least gain of the learned tokens per second, as a share of the gain in slots."""
PADDED, PACKED = "padded", "packed"


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report; returns 0 also if it cannot run here."""
    arguments = _parse(argv)
    if not arguments.data.is_file():
        print(f"not run: no data at {arguments.data}; give alpaca rows in one JSON list with --data")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        source = _tokenize(arguments.data, Path(folder), arguments.pad_len)
        packs = pack(source.sizes, arguments.pad_len)
        summary = PackingSummary.of(source, packs)
        print(f"{arguments.data.name}: {summary}\n")
        sources = {PADDED: source, PACKED: PackedSource(source, packs)}
        rounds = _measure(sources, arguments.pad_len, _QUICK_ROUNDS if arguments.quick else _ROUNDS)
    learned = {PADDED: summary.num_learned / len(source), PACKED: summary.num_learned / len(packs)}
    print(_table(rounds, learned))
    lost = {kind: 1 - _gain(rounds, kind, summary) / summary.gain for kind in Seconds._fields}
    aims = [Aim("share of the gain in slots that the step's time costs", lost["wall"], 1 - _LEAST_GAIN)]
    print(f"gain in learned tokens/s: {_gain(rounds, 'wall', summary):.2f} (slots: {summary.gain:.2f})")
    print("\n".join(aim_lines(aims)))
    if arguments.json:
        write_json(arguments.json, aims, rounds=rounds, summary=str(summary), lost=lost)
    _plot(arguments.plot, rounds, learned, summary)
    print(f"plot: {arguments.plot}")
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argument_parser("packing", __doc__, f"{_QUICK_ROUNDS} rounds instead of {_ROUNDS}")
    parser.add_argument("--data", type=Path, default=_DATA, help="alpaca rows, one JSON list")
    parser.add_argument("--pad-len", type=int, default=1024, help="tokens of a row, padding included")
    return parser.parse_args(argv)


def _tokenize(data: Path, folder: Path, pad_len: int) -> Any:
    """The set, with a tokenizer that is trained on it."""
    rows = json.loads(data.read_text(encoding="utf-8"))
    texts = (row.get(key, "") for row in rows for key in ("instruction", "input", "output"))
    write_tokenizer(folder, texts, _VOCAB_SIZE)
    return load_sft(data, load_tokenizer(str(folder)), sequence_length=pad_len)


def _packing_run(pad_len: int, cuda: bool) -> RunConfig:
    """The run of both trainers: small on a CPU, of the width of a 1B model on a GPU."""
    width = 2048 if cuda else 256
    model = llama(
        pad_len, num_layers=4, hidden_size=width, ffn_hidden_size=width * 11 // 4, kv_channels=64,
        num_attention_heads=width // 64, num_query_groups=width // 128, vocab_size=_VOCAB_SIZE,
    )  # fmt: skip
    precision = "bf16" if cuda else "fp32"
    return run_config(model, micro_batch_size=2, global_batch_size=_ROWS, sft=True, precision=precision)


def _measure(sources: dict[str, SampleSource], pad_len: int, num_rounds: int) -> dict[str, list[Seconds]]:
    """One step of each trainer in each round, the first one in turn."""
    context = DeviceContext.select(0)
    config = _packing_run(pad_len, context.is_cuda)
    rounds: dict[str, list[Seconds]] = {name: [] for name in sources}
    with job(context):
        groups = initialize(config, context)
        trainers = {
            name: OurTrainer(config, groups, context.device, _reader(source))
            for name, source in sources.items()
        }
        for trainer in trainers.values():
            trainer.step()
        for index in range(num_rounds):
            for name in (PADDED, PACKED) if index % 2 else (PACKED, PADDED):
                rounds[name].append(time_call(trainers[name].step, context))
    return rounds


def _reader(source: SampleSource) -> BatchReader:
    return BatchReader(
        source, micro_batch_size=2, global_batch_size=_ROWS, dp_rank=0, dp_size=1, seed=1, shuffle=True
    )


def _gain(rounds: dict[str, list[Seconds]], kind: str, summary: PackingSummary) -> float:
    """How many times as many learned tokens a second: the gain in slots, over what a step takes longer."""
    pairs = zip(rounds[PADDED], rounds[PACKED], strict=True)
    ratios = [getattr(padded, kind) / max(getattr(packed, kind), 1e-9) for padded, packed in pairs]
    return summary.gain * median(ratios)


def _speeds(rounds: dict[str, list[Seconds]], learned: dict[str, float], name: str) -> list[float]:
    """Learned tokens per second of each round, with the whole set's learned tokens of a row."""
    return [_ROWS * learned[name] / seconds.wall for seconds in rounds[name]]


def _table(rounds: dict[str, list[Seconds]], learned: dict[str, float]) -> str:
    lines = [f"{'':<8}{'ms a step':>10}{'CPU ms':>8}{'learned tokens/s':>18}{'quartiles':>16}"]
    for name in (PADDED, PACKED):
        lower, middle, upper = quantiles(_speeds(rounds, learned, name), n=4, method="inclusive")
        wall, cpu = (1e3 * median(getattr(step, kind) for step in rounds[name]) for kind in Seconds._fields)
        lines.append(f"{name:<8}{wall:>10.0f}{cpu:>8.0f}{middle:>18.0f}{f'{lower:.0f} - {upper:.0f}':>16}")
    return "\n".join(lines) + "\n"


def _plot(
    file: Path, rounds: dict[str, list[Seconds]], learned: dict[str, float], summary: PackingSummary
) -> None:
    """Bars of learned tokens per second with quartiles, and what packing would give if slots were all."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    canvas, axis = pyplot.subplots(figsize=(8, 2.5), layout="constrained")
    for name in (PACKED, PADDED):
        lower, middle, upper = quantiles(_speeds(rounds, learned, name), n=4, method="inclusive")
        axis.barh(name, middle, xerr=[[middle - lower], [upper - middle]])
        if name == PADDED:
            axis.axvline(middle * summary.gain, color="gray", linestyle="--", label="padded x gain in slots")
    axis.set(xlabel="learned tokens per second (median, quartiles)")
    axis.legend()
    canvas.savefig(file, dpi=120)
    pyplot.close(canvas)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
