"""Trains one model with moments of Adam in fp32, bf16 and 8 bits, from the same weights and batches: losses.

A decoder of 3.5 million weights predicts the bytes of this project's own Python source; the loss is that of
files which it has not seen.

python -m toolkits.benchmarks.moments [--quick] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from patch.optimizer import OptimizerConfig, ZeroStage, build_optimizer
from toolkits.benchmarks._report import Aim, Panel, Report, run_benchmark
from toolkits.benchmarks._runner import CPU, job

_WIDTH, _LAYERS, _HEADS, _LENGTH, _BATCH, _WARMUP = 256, 4, 4, 128, 16, 30
_STEPS, _QUICK_STEPS, _EVERY = 600, 200, 50
_LARGEST_DIFFERENCE = 0.02
"""Of losses, as a share: about what another order of batches changes."""
KINDS = ("fp32", "bf16", "8bit")


class _Decoder(torch.nn.Module):
    """Bytes [B, S] -> logits [B, S, 256]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(256, _WIDTH)
        self.position = torch.nn.Parameter(torch.randn(_LENGTH, _WIDTH) * 0.02)
        layer = torch.nn.TransformerEncoderLayer(
            _WIDTH, _HEADS, 4 * _WIDTH, 0.0, batch_first=True, norm_first=True
        )
        self.layers = torch.nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False)
        self.output = torch.nn.Linear(_WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """The mean loss of bytes [B, S + 1], each but the first."""
        mask = torch.nn.Transformer.generate_square_subsequent_mask(_LENGTH)
        hidden = self.layers(self.embedding(text[:, :-1]) + self.position, mask=mask, is_causal=True)
        return torch.nn.functional.cross_entropy(self.output(hidden).flatten(0, 1), text[:, 1:].flatten())


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report."""
    return run_benchmark(_run, argv, rounds=(_STEPS, _QUICK_STEPS), quick=f"{_QUICK_STEPS} steps")


def _run(arguments: argparse.Namespace) -> Report:
    files = sorted(Path(__file__).parents[2].glob("patch/**/*.py"))
    texts = [b"".join(f.read_bytes() for f in files[first::10]) for first in range(10)]
    train, held_out = b"".join(texts[1:]), texts[0]
    with job(CPU, threads=0):
        curves = {kind: _losses(kind, arguments.rounds, train, held_out) for kind in KINDS}
    final = {kind: found[-1] for kind, found in curves.items()}
    aims = [
        Aim(f"{kind}: loss / that of fp32", final[kind] / final["fp32"], 1 + _LARGEST_DIFFERENCE)
        for kind in KINDS[1:]
    ]
    text = "\n".join(f"{kind}: loss {final[kind]:.4f}" for kind in KINDS)
    points = [float(_EVERY * (index + 1)) for index in range(len(curves["fp32"]))]
    panel = Panel("step", curves={kind: (points, found) for kind, found in curves.items()}, ylabel="loss")
    return Report(f"{arguments.rounds} steps\n{text}\n", aims, [panel], {"losses": curves})


def _losses(kind: str, num_steps: int, train: bytes, held_out: bytes) -> list[float]:
    """Every _EVERY steps, the loss of text that is not trained on."""
    torch.manual_seed(0)
    model, batches = _Decoder(), torch.Generator().manual_seed(1)
    config = OptimizerConfig(lr=1e-3, exp_avg_dtype=kind, exp_avg_sq_dtype=kind)  # type: ignore[arg-type]
    optimizer = build_optimizer([model], config, ZeroStage.NONE)
    found = []
    for step in range(num_steps):
        optimizer.zero_grad(lr=1e-3 * min(1.0, (step + 1) / _WARMUP))
        optimizer.scale_loss(model(_batch(train, batches, _BATCH))).backward()
        optimizer.step()
        if (step + 1) % _EVERY == 0:
            optimizer.finish_param_sync()
            with torch.no_grad():
                found.append(model(_batch(held_out, torch.Generator().manual_seed(2), 128)).item())
    return found


def _batch(text: bytes, generator: torch.Generator, size: int) -> torch.Tensor:
    """Bytes [size, S + 1] from random places."""
    begins = torch.randint(len(text) - _LENGTH - 1, (size,), generator=generator).tolist()
    return torch.tensor([list(text[begin : begin + _LENGTH + 1]) for begin in begins])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
