"""Times one attention kernel in a process of its own: forward and backward at several lengths.

python -m toolkits.benchmarks._attention_run '{"contender": "cuDNN", ...}'    the fields of Task, as JSON
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.enums import AttnMaskType

from patch.config.backends import SdpaKernel
from patch.device import installed_libraries
from patch.model.attention import CausalAttention
from patch.plan import attended_pairs

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


@dataclass(frozen=True, kw_only=True)
class Task:
    """The work of the process."""

    contender: str
    lengths: tuple[int, ...]
    repeats: int
    """Timed passes at each length."""


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


def measure(task: Task) -> dict[str, float]:
    """Milliseconds of forward and backward by length, on the first GPU."""
    device, heads = torch.device("cuda", 0), Heads()
    attend = CONTENDERS[task.contender].build(heads)
    found = {}
    for length in task.lengths:
        tensors = random_tensors(length, rows_of(length), heads, device)
        for _ in range(_WARM_UP):
            forward_and_backward(attend, tensors)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(task.repeats + 1)]
        events[0].record()
        for event in events[1:]:
            forward_and_backward(attend, tensors)
            event.record()
        torch.cuda.synchronize()
        times = [begin.elapsed_time(end) for begin, end in zip(events, events[1:], strict=False)]
        found[str(length)] = sorted(times)[len(times) // 2]
    return found


if __name__ == "__main__":
    os.environ.setdefault("NVTE_DEBUG", "0")
    fields = json.loads(sys.argv[1])
    print(json.dumps(measure(Task(**fields | {"lengths": tuple(fields["lengths"])}))))
