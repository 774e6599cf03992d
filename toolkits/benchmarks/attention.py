"""Measures the attention kernels of a GPU, forward and backward, with the heads of LLaMA-3.1 8B in bf16.

    python -m toolkits.benchmarks attention [--quick] [--json FILE]

It needs a GPU. Each kernel runs in its own process.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import pairwise
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.enums import AttnMaskType

from patch.config.backends import SdpaKernel, backends_of
from patch.device import DeviceContext, MachineFacts
from patch.model.attention import CausalAttention
from patch.plan.flops import attended_pairs, peak_flops
from toolkits.benchmarks._contenders import SHAPE_8B, run_config
from toolkits.benchmarks._measure import needs_gpu, try_alone
from toolkits.benchmarks._report import Aim, Report, table

_LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
_QUICK_LENGTHS = (4096, 8192, 32768, 131072)
_TIMEOUT_S = 180
_MOST = 1.05
"""Time of the kernel that we take over that of the fastest."""
Times = dict[str, dict[int, float]]
"""Contender -> length -> milliseconds; what failed or is not installed is missing."""
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Causal attention: [S, B, N, D], [S, B, G, D], [S, B, G, D] to [S, B, N * D]."""
_BACKWARD = 2.5
"""FLOPs of backward over those of forward: five products instead of two."""
_UNTIMED = 2
_BATCH_TOKENS = 16384
"""Tokens of all rows of a batch, so that short rows fill the device too."""
ROUNDS = (15, 5)


class Heads(NamedTuple):
    """The heads of a layer; LLaMA-3.1 8B's."""

    queries: int = 32
    groups: int = 8
    size: int = 128


def run(arguments: argparse.Namespace) -> Report:
    """Measure and report."""
    machine = needs_gpu()
    lengths = _QUICK_LENGTHS if arguments.quick else _LENGTHS
    times: Times = {}
    for name, (library, _) in CONTENDERS.items():
        if library and library not in machine.libraries:
            print(f"{name}: not run, {library} is not installed")
            continue
        measured = try_alone(
            measure, _TIMEOUT_S, on_gpu=True, contender=name, lengths=lengths, repeats=arguments.rounds
        )
        times[name] = {int(length): value for length, value in (measured or {}).items()}
    text = times_table(times, lengths, machine.cuda_name)
    return Report(text, aims_of(times, default_contender(machine)), {"milliseconds": times})


def default_contender(machine: MachineFacts) -> str:
    """The attention that our layers take by default."""
    taken = backends_of(run_config(8192, num_layers=1, **SHAPE_8B, precision="bf16"), machine)
    if taken.sdpa[0] == "cudnn":
        return "cuDNN"
    return "FlashAttention-3" if taken.has_flash_attention_3 else "FlashAttention-2"


def num_flops(length: int, heads: Heads = Heads()) -> float:  # noqa: B008
    """FLOPs of forward and backward over a batch of causal sequences; masked pairs do not count."""
    forward = 4 * heads.queries * heads.size * attended_pairs([length], None) * rows_of(length)
    return forward * (1 + _BACKWARD)


def rows_of(length: int) -> int:
    """Rows of a batch."""
    return max(1, _BATCH_TOKENS // length)


def tflops(length: int, milliseconds: float) -> float:
    """TFLOP/s of forward and backward."""
    return num_flops(length) / milliseconds / 1e9


def aims_of(times: Times, ours: str) -> list[Aim]:
    """The time of our kernel at each length over that of the fastest."""
    aims = []
    for length, milliseconds in times.get(ours, {}).items():
        fastest = min(found[length] for found in times.values() if length in found)
        aims.append(Aim(f"{length} tokens: {ours} / the fastest", milliseconds / fastest, _MOST))
    return aims


def times_table(times: Times, lengths: Sequence[int], gpu: str) -> str:
    """TFLOP/s of each kernel at each length, and the share of the GPU's dense bf16 peak."""
    peak = peak_flops(gpu) or float("nan")
    rows = []
    for name, found in times.items():
        rates = [tflops(length, found[length]) if length in found else 0.0 for length in lengths]
        cells = (f"{rate:.0f} ({rate * 1e12 / peak:.0%})" if rate else "failed" for rate in rates)
        rows.append([name, *cells])
    return table(("TFLOP/s, forward and backward", *lengths), rows)


def by_torch(heads: Heads, *kernels: SdpaKernel) -> Attend:
    """The attention of our layers, with these kernels of torch and no others."""
    config: Any = SimpleNamespace(kv_channels=heads.size, window_size=None)
    attention = CausalAttention(
        config=config, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self",
        kernels=kernels,
    )  # fmt: skip
    return lambda query, key, value: attention(query, key, value, None)


def _by_flash_3(heads: Heads) -> Attend:
    from torch.nn import attention

    attention.activate_flash_attention_impl("FA3")
    return by_torch(heads, "flash")


def _by_engine(heads: Heads) -> Attend:
    """Transformer Engine's choice."""
    engine: Any = import_module("transformer_engine.pytorch")
    attend = engine.DotProductAttention(
        heads.queries, heads.size, num_gqa_groups=heads.groups, attn_mask_type="causal", qkv_format="sbhd",
        attention_dropout=0.0,
    )  # fmt: skip
    return lambda query, key, value: attend(query, key, value)


CONTENDERS: dict[str, tuple[str, Callable[[Heads], Attend]]] = {
    "cuDNN": ("", lambda heads: by_torch(heads, "cudnn")),
    "FlashAttention-2": ("", lambda heads: by_torch(heads, "flash")),
    "FlashAttention-3": ("flash_attn_3", _by_flash_3),
    "Transformer Engine": ("transformer_engine", _by_engine),
}
"""The library that each needs beside torch, as MachineFacts names it, and the kernel."""


def forward_and_backward(attend: Attend, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The result and the gradients of query, key and value for a fixed direction.

    Args:
        attend: the kernel.
        tensors: query, key, value, and the gradient of the result.
    """
    *inputs, direction = tensors
    result = attend(*inputs)
    return [result, *torch.autograd.grad(result, inputs, direction.view_as(result))]


def random_tensors(length: int, rows: int, heads: Heads, device: torch.device) -> list[torch.Tensor]:
    """Query, key, value, and the gradient of the result, in bf16 from a seed."""
    torch.manual_seed(length)
    counts = (heads.queries, heads.groups, heads.groups, heads.queries)
    tensors = [
        torch.randn(length, rows, count, heads.size, device=device, dtype=torch.bfloat16) for count in counts
    ]
    return [tensor.requires_grad_(index < 3) for index, tensor in enumerate(tensors)]


def measure(context: DeviceContext, contender: str, lengths: Sequence[int], repeats: int) -> dict[str, float]:
    """Milliseconds of forward and backward by length: the median of `repeats` passes."""
    attend = CONTENDERS[contender][1](Heads())
    found = {}
    for length in lengths:
        tensors = random_tensors(length, rows_of(length), Heads(), context.device)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(_UNTIMED + repeats)]
        for mark in marks:
            forward_and_backward(attend, tensors)
            mark.record()
        torch.cuda.synchronize()
        passes = [*pairwise(marks)][-repeats:]
        found[str(length)] = median(begin.elapsed_time(end) for begin, end in passes)
    return found
