"""Dependencies of a result's bits besides our code: torch's version, its vector width, and its libraries.

torch selects its own loops by `get_cpu_capability`. MKL (float32 products) and oneDNN (bf16 and fp16) select
theirs by the CPU's vendor and instructions, and do not report them. So the key contains the results of plain
torch operations with the shapes of the golden runs.
"""

import hashlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F

LINEARS = [
    (64, 128), (64, 64), (64, 320), (160, 64), (64, 256), (64, 400), (32, 64), (64, 160), (80, 64),
]  # fmt: skip
"""Inputs and outputs of `small_run`'s layers: QKV, projection, MLP, vocabularies, and their TP=2 shards."""
SEQUENCE, BATCH, HEADS, CHANNELS = 32, 2, 4, 16


def machine_key() -> str:
    """Return the key of this process, which includes its number of threads."""
    found = hashlib.sha256()
    for result in _plain_results():
        found.update(result.reshape(-1).view(torch.uint8).numpy())
    version = torch.__version__.split("+")[0]
    return f"torch {version}, {torch.backends.cpu.get_cpu_capability()}, {found.hexdigest()[:12]}"


def _plain_results() -> Iterator[torch.Tensor]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield from _linears(dtype)
        yield from _attention(dtype)
    yield from _elementwise()


def _numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return numbers in [-1, 1), equal on every machine, with enough digits that their sums are rounded."""
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randint(-(2**23), 2**23, shape, generator=generator) / 2**23).to(dtype)


def _with_gradients(result: torch.Tensor, *inputs: torch.Tensor) -> Iterator[torch.Tensor]:
    upstream = _numbers(*result.shape, dtype=result.dtype)
    for tensor in (result, *torch.autograd.grad(result, inputs, upstream)):
        yield tensor.detach().contiguous()


def _linears(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    for inputs, outputs in LINEARS:
        hidden = _numbers(SEQUENCE, BATCH, inputs, dtype=dtype).requires_grad_()
        weight = _numbers(outputs, inputs, dtype=dtype).requires_grad_()
        yield from _with_gradients(F.linear(hidden, weight), hidden, weight)


def _attention(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    for heads in (HEADS, HEADS // 2):
        heads_of = [_numbers(BATCH, heads, SEQUENCE, CHANNELS, dtype=dtype).requires_grad_() for _ in "qkv"]
        query, key, value = heads_of
        fused = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        yield from _with_gradients(fused, *heads_of)
        scores = (query @ key.transpose(2, 3)).softmax(-1, dtype=torch.float32)
        yield from _with_gradients(scores.to(dtype) @ value, *heads_of)


def _elementwise() -> Iterator[torch.Tensor]:
    """Yield norms, activation, loss, RoPE's angles, random weights."""
    hidden, weight = _numbers(64, 64).requires_grad_(), _numbers(64).requires_grad_()
    yield from _with_gradients(F.rms_norm(hidden, [64], weight), hidden, weight)
    for function in (F.silu, torch.exp, torch.sin, torch.cos, lambda x: x.log_softmax(-1)):
        yield from _with_gradients(function(hidden), hidden)
    yield torch.empty(64, 64).normal_(generator=torch.Generator().manual_seed(0))
    yield torch.linalg.vector_norm(hidden.detach())
