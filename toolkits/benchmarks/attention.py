"""Measures the attention kernels of a GPU, forward and backward, with the heads of LLaMA-3.1 8B in bf16.

    python -m toolkits.benchmarks.attention [--quick] [--json FILE] [--plot FILE]

It needs a GPU. Each kernel runs in its own process.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.enums import AttnMaskType

from patch.config.backends import SdpaKernel
from patch.device import DeviceContext, MachineFacts, installed_libraries
from patch.model.attention import CausalAttention
from patch.plan.flops import attended_pairs, peak_flops
from toolkits.benchmarks._report import Aim, Panel, Report, run_benchmark, table
from toolkits.benchmarks._runner import needs_gpu, try_alone

_LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
_QUICK_LENGTHS = (4096, 8192, 32768, 131072)
_REPEATS, _QUICK_REPEATS = 15, 5
_TIMEOUT_S = 180
_MOST = 1.05
"""Time of the kernel that we take over that of the fastest."""
_HOPPER, _BLACKWELL = (9, 0), (11, 0)
Times = dict[str, dict[int, float]]
"""Contender -> length -> milliseconds; what failed or is not installed is missing."""
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Causal attention: [S, B, N, D], [S, B, G, D], [S, B, G, D] to [S, B, N * D]."""
_BACKWARD = 2.5
"""FLOPs of backward over those of forward: five products instead of two."""
_WARM_UP = 2


class Heads(NamedTuple):
    """The heads of a layer; LLaMA-3.1 8B's."""

    queries: int = 32
    groups: int = 8
    size: int = 128


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report."""
    return run_benchmark("attention", __doc__, argv, _run, "fewer lengths and passes")


def _run(arguments: argparse.Namespace) -> Report:
    machine = needs_gpu()
    lengths = _QUICK_LENGTHS if arguments.quick else _LENGTHS
    repeats = _QUICK_REPEATS if arguments.quick else _REPEATS
    times: Times = {}
    for name in CONTENDERS:
        if missing := obstacle(name):
            print(f"{name}: not run, {missing}")
            continue
        measured = try_alone(measure, _TIMEOUT_S, contender=name, lengths=lengths, repeats=repeats)
        times[name] = {int(length): value for length, value in (measured or {}).items()}
    curves = {
        name: (list(found), [tflops(length, value) for length, value in found.items()])
        for name, found in times.items()
    }
    ylabel = "TFLOP/s, forward and backward"
    panel = Panel("tokens of a sequence", curves=curves, ylabel=ylabel, scales=("log", "linear"))
    aims = aims_of(times, default_contender(machine))
    text = times_table(times, lengths, machine.cuda_name)
    return Report(text, aims, [panel], {"milliseconds": times})


def default_contender(machine: MachineFacts) -> str:
    """What our layers take by default (patch/config/backends.py)."""
    return "cuDNN" if _HOPPER <= machine.compute_capability < _BLACKWELL else "FlashAttention-2"


def tflops(length: int, milliseconds: float) -> float:
    """TFLOP/s of forward and backward."""
    return num_flops(length, rows_of(length), Heads()) / milliseconds / 1e9


def aims_of(times: Times, ours: str) -> list[Aim]:
    """Our kernel's time at each length over that of the fastest."""
    aims = []
    for length, milliseconds in times.get(ours, {}).items():
        fastest = min(found[length] for found in times.values() if length in found)
        aims.append(Aim(f"{length} tokens: {ours} / the fastest", milliseconds / fastest, _MOST))
    return aims


def times_table(times: Times, lengths: Sequence[int], gpu: str) -> str:
    """TFLOP/s of each kernel at each length, and the share of the GPU's dense bf16 peak."""
    peak = peak_flops(gpu)
    rows = []
    for name, found in times.items():
        cells = []
        for length in lengths:
            rate = tflops(length, found[length]) if length in found else None
            share = f" ({rate * 1e12 / peak:.0%})" if rate is not None and peak else ""
            cells.append("failed" if rate is None else f"{rate:.0f}{share}")
        rows.append([name, *cells])
    return table(("TFLOP/s, forward and backward", *lengths), rows)


class Contender(NamedTuple):
    """A kernel."""

    library: str
    """The library that it needs, as MachineFacts names it; "": torch alone."""
    build: Callable[[Heads], Attend]


def _by_torch(*kernels: SdpaKernel) -> Callable[[Heads], Attend]:
    """The attention of our layers, with these kernels and no others."""

    def build(heads: Heads) -> Attend:
        return _ours(heads, kernels)

    return build


def _ours(heads: Heads, kernels: tuple[SdpaKernel, ...]) -> Attend:
    config: Any = SimpleNamespace(kv_channels=heads.size, window_size=None)
    attention = CausalAttention(
        config=config, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self",
        kernels=kernels,
    )  # fmt: skip
    return lambda query, key, value: attention(query, key, value, None)


def _by_flash_3(heads: Heads) -> Attend:
    from torch.nn import attention

    attention.activate_flash_attention_impl("FA3")
    return _ours(heads, ("flash",))


def _by_engine(heads: Heads) -> Attend:
    """Transformer Engine's choice."""
    engine: Any = import_module("transformer_engine.pytorch")
    attend = engine.DotProductAttention(
        heads.queries, heads.size, num_gqa_groups=heads.groups, attn_mask_type="causal", qkv_format="sbhd",
        attention_dropout=0.0,
    )  # fmt: skip
    return lambda query, key, value: attend(query, key, value)


CONTENDERS = {
    "cuDNN": Contender("", _by_torch("cudnn")),
    "FlashAttention-2": Contender("", _by_torch("flash")),
    "FlashAttention-3": Contender("flash_attn_3", _by_flash_3),
    "Transformer Engine": Contender("transformer_engine", _by_engine),
}


def obstacle(name: str) -> str:
    """The library that a contender lacks here; "" if none."""
    library = CONTENDERS[name].library
    return "" if not library or library in installed_libraries() else f"{library} is not installed"


def rows_of(length: int, tokens: int = 16384) -> int:
    """Rows of a batch: as many as have `tokens` tokens, so that short rows fill the device too."""
    return max(1, tokens // length)


def num_flops(length: int, rows: int, heads: Heads) -> float:
    """FLOPs of forward and backward over `rows` causal sequences; masked pairs do not count."""
    forward = 4 * heads.queries * heads.size * attended_pairs([length], None) * rows
    return forward * (1 + _BACKWARD)


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
    os.environ.setdefault("NVTE_DEBUG", "0")
    heads = Heads()
    attend = CONTENDERS[contender].build(heads)
    found = {}
    for length in lengths:
        tensors = random_tensors(length, rows_of(length), heads, context.device)
        for _ in range(_WARM_UP):
            forward_and_backward(attend, tensors)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        events[0].record()
        for event in events[1:]:
            forward_and_backward(attend, tensors)
            event.record()
        torch.cuda.synchronize()
        times = [begin.elapsed_time(end) for begin, end in zip(events, events[1:], strict=False)]
        found[str(length)] = sorted(times)[len(times) // 2]
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
