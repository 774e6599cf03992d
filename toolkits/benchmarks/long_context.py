"""Measures memory against tokens / CP, and trains a step of 131072 tokens at CP 4 by the launcher.

    python -m toolkits.benchmarks.long_context [--quick] [--json FILE] [--plot FILE]

On the CPU, with a model so small that attention to 131072 tokens takes minutes. The ranks share the cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from toolkits.benchmarks._link import run_ranks
from toolkits.benchmarks._long_context_rank import SHAPE, Task
from toolkits.benchmarks._report import Aim, aim_lines, argument_parser, write_json
from toolkits.quickstart.seed_model import write_tokenizer

_TOKENS, _QUICK_TOKENS = (8192, 16384, 32768, 65536, 131072), (2048, 4096)
_CP_SIZES = (1, 2, 4)
_MOST_ON_RANK = 65536
_LARGEST_CP = max(_CP_SIZES)
_MOST_ABOVE = 0.02
"""What does not grow with tokens is part of it. Less is possible: the loss of many tokens goes in chunks."""
_TIMEOUT_S = 1800
_SCRIPT = Path(__file__).parents[2] / "examples" / "llama3_1" / "run_mcore_llama.sh"


class Peak(NamedTuple):
    """The memory of a step."""

    tokens: int
    cp_size: int
    peak_bytes: int

    @property
    def bytes_a_token(self) -> float:
        """Bytes for each token of a rank."""
        return self.peak_bytes * self.cp_size / self.tokens


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report."""
    arguments = argument_parser("long_context", __doc__, "up to 4096 tokens: a minute").parse_args(argv)
    sizes = _QUICK_TOKENS if arguments.quick else _TOKENS
    peaks = [peak for cp_size in _CP_SIZES for peak in _measure(sizes, cp_size)]
    print(_table(peaks))
    trained = _train(max(sizes))
    print(
        f"{max(sizes)} tokens at CP {_LARGEST_CP} by the launcher: loss {trained['loss']:.3f}, step "
        f"{trained['step_time_ms'] / 1e3:.0f} s, {trained['peak_memory_gib']:.2f} GiB a process with torch\n"
    )
    aims = [Aim("memory above proportional to tokens / CP, at most, CP > 1", _above(peaks), _MOST_ABOVE)]
    print("\n".join(aim_lines(aims)))
    if arguments.json:
        write_json(arguments.json, aims, peaks=[peak._asdict() for peak in peaks], trained=trained)
    _plot(arguments.plot, peaks)
    print(f"plot: {arguments.plot}")
    return 0


def _measure(sizes: Sequence[int], cp_size: int) -> list[Peak]:
    """The peak bytes of a step on the worst rank, for each length that is not too long for one rank."""
    tokens = [size for size in sizes if size // cp_size <= _MOST_ON_RANK]
    found = run_ranks(Task(tokens=tokens), cp_size, None, _TIMEOUT_S)
    return [Peak(size, cp_size, peak) for size, peak in zip(tokens, found, strict=True)]


def _train(tokens: int) -> dict[str, Any]:
    """Train one step on one text of more than `tokens` tokens, as a user does; the step's metrics."""
    with tempfile.TemporaryDirectory() as folder:
        words = " ".join(f"word{number}" for number in range(tokens // 2))
        write_tokenizer(Path(folder) / "tokenizer", [words[:10000]], SHAPE["vocab_size"])
        data, output = Path(folder) / "data.jsonl", Path(folder) / "run"
        data.write_text(json.dumps({"text": words}) + "\n", encoding="utf-8")
        positions = [
            "dsw", "tiny", 1, 1, 1e-4, 1e-5, tokens, tokens, "fp32", 1, 1, _LARGEST_CP, "false", "true",
            "true", "true", "none", "false", 1, data, "none", "none", 1, 0, output,
        ]  # fmt: skip
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in SHAPE.items()]
        flags += [f"--max-position-embeddings={tokens}", "--cp-comm-type=p2p", f"--cache-dir={folder}/cache"]
        environment = {
            "PYTHON": sys.executable, "MP_DATASET_TYPE": "raw", "TOKENIZER_PATH": f"{folder}/tokenizer",
            "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        subprocess.run(
            ["bash", str(_SCRIPT), *map(str, positions), *flags],
            env={**os.environ, **environment}, check=True, timeout=_TIMEOUT_S, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        lines = (output / "log" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return json.loads(lines[0])


def _above(peaks: Sequence[Peak]) -> float:
    """How far the most bytes of a token are above their median, with CP; without it attention is another."""
    found = [peak.bytes_a_token for peak in peaks if peak.cp_size > 1]
    return max(found) / median(found) - 1


def _table(peaks: Sequence[Peak]) -> str:
    lines = [f"{'tokens':>8}{'CP':>4}{'tokens / CP':>13}{'peak MiB':>10}{'bytes a token':>15}"]
    for peak in peaks:
        lines.append(
            f"{peak.tokens:>8}{peak.cp_size:>4}{peak.tokens // peak.cp_size:>13}"
            f"{peak.peak_bytes / 2**20:>10.1f}{peak.bytes_a_token:>15.0f}"
        )
    return "\n".join(lines) + "\n"


def _plot(file: Path, peaks: Sequence[Peak]) -> None:
    """Memory of a rank against its tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    canvas, axis = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for cp_size in _CP_SIZES:
        own = [peak for peak in peaks if peak.cp_size == cp_size]
        own_tokens = [peak.tokens / cp_size for peak in own]
        axis.plot(own_tokens, [peak.peak_bytes / 2**20 for peak in own], marker="o", label=f"CP {cp_size}")
    axis.set(xlabel="tokens of a rank", ylabel="peak MiB of a step")
    axis.legend()
    canvas.savefig(file, dpi=120)
    pyplot.close(canvas)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
