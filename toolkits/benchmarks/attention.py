"""Measure the attention kernels of a GPU, forward and backward, with the heads of LLaMA-3.1 8B in bf16.

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

from patch.device import DeviceContext, MachineFacts
from patch.features.backends import AttentionKernel, choose_backends
from patch.model.attention.core_attention import CausalAttention
from patch.plan.flops import attended_pairs, peak_flops
from toolkits.benchmarks._contenders import SHAPE_8B, run_config
from toolkits.benchmarks._measure import needs_gpu, try_on_gpu
from toolkits.benchmarks._report import Aim, Report, table

_LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
_QUICK_LENGTHS = (4096, 8192, 32768, 131072)
_TIMEOUT_S = 180
_MOST = 1.05
"""Largest acceptable ratio of our default kernel's time to the fastest kernel's time."""
Times = dict[str, dict[int, float]]
"""Contender -> length -> milliseconds, without contenders that failed or are not installed."""
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Causal attention: query [S, B, N, D], key and value [S, B, G, D] to [S, B, N * D]."""
_BACKWARD = 2.5
"""FLOPs of backward divided by those of forward: five matrix products instead of two."""
_UNTIMED = 2
_BATCH_TOKENS = 16384
"""Tokens of a batch. Short rows fill the device too, because a batch has more of them."""
ROUNDS = (15, 5)


class Heads(NamedTuple):
    """Heads of a layer, by default those of LLaMA-3.1 8B."""

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
        measured = try_on_gpu(measure, _TIMEOUT_S, contender=name, lengths=lengths, repeats=arguments.rounds)
        times[name] = {int(length): value for length, value in (measured or {}).items()}
    text = times_table(times, lengths, machine.cuda_name)
    return Report(text, aims_of(times, default_contender(machine)), {"milliseconds": times})


def default_contender(machine: MachineFacts) -> str:
    """Return the attention contender that our layers use by default."""
    taken = choose_backends(run_config(8192, num_layers=1, **SHAPE_8B, precision="bf16"), machine)
    names = {"cudnn": "cuDNN", "flash_attn": "the package flash-attn 2"}
    return names.get(taken.attention[0], f"FlashAttention-{taken.flash[-1]}")


def num_flops(length: int, heads: Heads = Heads()) -> float:  # noqa: B008
    """Return the FLOPs of forward and backward over a batch of causal rows, without masked pairs."""
    forward = 4 * heads.queries * heads.size * attended_pairs([length], None) * rows_of(length)
    return forward * (1 + _BACKWARD)


def rows_of(length: int) -> int:
    """Return the number of rows of a batch."""
    return max(1, _BATCH_TOKENS // length)


def tflops(length: int, milliseconds: float) -> float:
    """Return the TFLOP/s of forward and backward."""
    return num_flops(length) / milliseconds / 1e9


def aims_of(times: Times, ours: str) -> list[Aim]:
    """Return the time of our kernel divided by the fastest kernel's time, for each length."""
    aims = []
    for length, milliseconds in times.get(ours, {}).items():
        fastest = min(found[length] for found in times.values() if length in found)
        aims.append(Aim(f"{length} tokens: {ours} / the fastest", milliseconds / fastest, _MOST))
    return aims


def times_table(times: Times, lengths: Sequence[int], gpu: str) -> str:
    """Return a table of TFLOP/s by kernel and length, with the share of the GPU's dense bf16 peak."""
    peak = peak_flops(gpu) or float("nan")
    rows = []
    for name, found in times.items():
        rates = [tflops(length, found[length]) if length in found else 0.0 for length in lengths]
        cells = (f"{rate:.0f} ({rate * 1e12 / peak:.0%})" if rate else "failed" for rate in rates)
        rows.append([name, *cells])
    return table(("TFLOP/s, forward and backward", *lengths), rows)


def by_torch(heads: Heads, *kernels: AttentionKernel) -> Attend:
    """Return the attention of our layers, restricted to these SDPA kernels of torch."""
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
    "the package flash-attn 2": ("flash_attn", lambda heads: by_torch(heads, "flash_attn")),
    "Transformer Engine": ("transformer_engine", _by_engine),
}
"""Contender -> library that it needs beside torch (name in MachineFacts), function that builds it."""


def forward_and_backward(attend: Attend, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the result, and the gradients of query, key and value for a fixed output gradient.

    Args:
        tensors: query, key, value, and the gradient of the result.
    """
    *inputs, direction = tensors
    result = attend(*inputs)
    return [result, *torch.autograd.grad(result, inputs, direction.view_as(result))]


def random_tensors(length: int, rows: int, heads: Heads, device: torch.device) -> list[torch.Tensor]:
    """Return query, key, value, and the gradient of the result, in bf16 from a fixed seed."""
    torch.manual_seed(length)
    counts = (heads.queries, heads.groups, heads.groups, heads.queries)
    tensors = [
        torch.randn(length, rows, count, heads.size, device=device, dtype=torch.bfloat16) for count in counts
    ]
    return [tensor.requires_grad_(index < 3) for index, tensor in enumerate(tensors)]


def measure(context: DeviceContext, contender: str, lengths: Sequence[int], repeats: int) -> dict[str, float]:
    """Return length -> milliseconds of forward and backward, the median of `repeats` passes."""
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
