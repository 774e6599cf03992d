"""Attention on a GPU: each backend, packed rows, and pieces of keys against all scores."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from small_runs import small_run
from torch.nn import attention as torch_attention

from patch.compat.attention_kernels import attend_backward, attend_with_lse
from patch.device import DeviceContext, MachineFacts
from patch.distributed.groups import initialize
from patch.features.backends import choose_backends
from patch.model import PackedSequences
from patch.model.attention.alibi import AlibiAttention, slopes
from patch.model.attention.core_attention import CausalAttention
from patch.model.attention.varlen import takes_varlen
from patch.model.backends import backends_on
from patch.model.configuration import transformer_config

BOUNDS = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.03}
"""Outputs and gradients are near 1; two kernels round in other places."""
LENGTHS = [100, 1, 155, 256]
"""Of two rows of 256 tokens: three sequences, and one that fills its row."""


def causal(size: int, window: int | None = None, **more: Any) -> CausalAttention:
    config = SimpleNamespace(kv_channels=size, window_size=window and (window - 1, 0))
    return CausalAttention(
        config=config, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self", **more
    )


def alibi(**more: Any) -> AlibiAttention:
    """Of six heads of 64 channels on one rank, on the GPU."""
    alone = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    return AlibiAttention(
        config=SimpleNamespace(kv_channels=64, num_attention_heads=6, window_size=None),
        attention=CausalAttention, num_channels=8, layer_number=1, attn_mask_type=AttnMaskType.causal,
        attention_type="self", pg_collection=SimpleNamespace(cp=alone, tp=alone), **more,
    ).cuda()  # fmt: skip


def heads(*shape: int, dtype: torch.dtype, counts: tuple[int, int]) -> list[torch.Tensor]:
    """Query, key and value, [*shape[:-1], heads, shape[-1]]."""
    torch.manual_seed(0)
    *outer, size = shape
    return [
        torch.randn(*outer, count, size, device="cuda", dtype=dtype, requires_grad=True)
        for count in (counts[0], counts[1], counts[1])
    ]


@pytest.mark.parametrize("wish", ["auto", "flash", "fused", "local"])
@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize(("size", "window"), [(64, None), (80, None), (128, None), (64, 32)])
def test_every_backend_attends_as_all_scores_do(
    job: DeviceContext, wish: str, is_deterministic: bool, size: int, window: int | None
) -> None:
    groups = initialize(small_run(), job)
    inputs = heads(200, 2, size, dtype=torch.bfloat16, counts=(8, 2))
    direction = torch.randn(200, 2, 8 * size, device="cuda", dtype=torch.bfloat16)
    found = []
    torch.use_deterministic_algorithms(is_deterministic)
    try:
        for backend in (wish, "unfused"):
            run = small_run(
                precision="bf16", deterministic_mode=is_deterministic, attention_backend=backend
            )
            upstream = transformer_config(run, groups, cuda=True)
            backends = backends_on(job.device, run, groups, upstream)
            is_active = torch_attention.current_flash_attention_impl() == "FA3"
            assert is_active == (backends.flash == "FA3")
            context = causal(size, window, kernels=backends.attention)(*inputs, None)
            found.append([context, *torch.autograd.grad((context * direction).sum(), inputs)])
    finally:
        torch.use_deterministic_algorithms(False)
    bound = BOUNDS[torch.bfloat16]
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=bound, atol=bound)


def test_fp32_with_grouped_heads_has_no_scores_in_memory() -> None:
    run = small_run(precision="fp32")
    attention = causal(64, kernels=choose_backends(run, MachineFacts.probe()).attention)
    inputs = [tensor.detach() for tensor in heads(4096, 1, 64, dtype=torch.float32, counts=(8, 2))]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention(*inputs, None)
    assert torch.cuda.max_memory_allocated() - before < 8 * 4096 * 4096 * 4 / 2


@pytest.mark.parametrize("counts", [(8, 8), (8, 2)])
@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_packed_rows_in_one_kernel_give_what_each_sequence_gives_alone(
    counts: tuple[int, int], window: int | None, dtype: torch.dtype
) -> None:
    inputs, attention = heads(256, 2, 64, dtype=dtype, counts=counts), causal(64, window)
    borders = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    packed = PackedSequences.of(borders, torch.empty(2, 256), torch.device("cuda"))
    assert takes_varlen(inputs[0]), "torch has no varlen_attn with a window here"
    direction = torch.randn(256, 2, counts[0] * 64, device="cuda", dtype=dtype)
    found = []
    for attention.may_use_varlen in (True, False):
        context = attention(*inputs, None, packed_seq_params=packed)
        found.append([context, *torch.autograd.grad((context * direction).sum(), inputs)])
    for one_kernel, one_by_one in zip(*found, strict=True):
        torch.testing.assert_close(one_kernel, one_by_one, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("kernel", ["flash", "cudnn", "efficient", "packed"])
def test_alibi_in_every_kernel_is_that_of_all_scores(kernel: str, dtype: torch.dtype) -> None:
    """700 tokens, whose positions bf16 does not have; nothing of the size of the scores is in memory."""
    if dtype == torch.float32 and kernel != "efficient":
        pytest.skip("the others take no fp32")
    inputs = heads(700, 1, 64, dtype=dtype, counts=(6, 6))
    query, key, value = (tensor.double().permute(1, 2, 0, 3) for tensor in inputs)
    place = torch.arange(700, device="cuda")
    bias = slopes(6).cuda().double()[:, None, None] * (place - place[:, None]).clamp(max=0)
    bias = bias.masked_fill(place > place[:, None], -torch.inf)
    expected = F.scaled_dot_product_attention(query, key, value, bias[None]).permute(2, 0, 1, 3).flatten(2)
    direction = torch.randn_like(expected)
    gradients = torch.autograd.grad((expected * direction).sum(), inputs)
    borders = torch.tensor([0, 700], dtype=torch.int32)
    packed = PackedSequences.of(borders, torch.empty(1, 700), torch.device("cuda"))
    attention = alibi(kernels=() if kernel == "packed" else (kernel,))
    context = attention(*inputs, None, packed_seq_params=packed if kernel == "packed" else None)
    found = torch.autograd.grad((context * direction).sum(), inputs)
    for ours, theirs in zip((context, *found), (expected, *gradients), strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=0, atol=2 * BOUNDS[dtype])


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("counts", [(8, 8), (8, 2)])
@pytest.mark.parametrize(("window", "takes_cudnn"), [(None, False), (None, True), (60, False)])
def test_pieces_of_keys_give_what_all_keys_give(
    dtype: torch.dtype, counts: tuple[int, int], window: int | None, takes_cudnn: bool
) -> None:
    """As around a ring: the last tokens see all of the first piece, and the second one causally."""
    from patch.model.kernels.fused import merge_attention  # not importable without Triton

    kind: dict[str, Any] = {"scale": 0.125, "takes_cudnn": takes_cudnn}
    length, half = 100, 50
    inputs = heads(2, length, 64, dtype=dtype, counts=counts)
    query, key, value = (tensor.transpose(1, 2).contiguous() for tensor in inputs)
    query = query[:, :, half:]
    visible = torch.ones(half, length, dtype=torch.bool, device="cuda").tril(half)
    visible = visible.triu(half - (window or length) + 1)
    expected = F.scaled_dot_product_attention(
        query.float(), key.float(), value.float(), visible, scale=0.125, enable_gqa=True
    )
    direction = torch.randn_like(query)
    gradients = torch.autograd.grad((expected * direction).sum(), inputs)

    bias = torch.zeros(half, length, device="cuda", dtype=dtype).masked_fill_(~visible, -torch.inf)
    pieces = []
    for part, is_causal in ((slice(0, half), False), (slice(half, length), True)):
        mask = None if window is None else bias[:, part]
        pieces.append((key[:, :, part], value[:, :, part], mask, is_causal and window is None))
    with torch.no_grad():
        found = [attend_with_lse(query, k, v, b, is_causal=c, **kind) for k, v, b, c in pieces]
        lse = torch.full(query.shape[:3], -torch.inf, device="cuda")
        wide = torch.full((half, 2, query.shape[1], 64), torch.nan, device="cuda").permute(1, 2, 0, 3)
        for part, part_lse in found:
            merge_attention(wide, lse, part, part_lse)
        out = wide.to(dtype)
        torch.testing.assert_close(out.float(), expected, rtol=0, atol=BOUNDS[dtype])
        parts = [
            attend_backward(direction, query, k, v, b, out, lse, is_causal=c, **kind) for k, v, b, c in pieces
        ]
    of_query, of_key, of_value = zip(*parts, strict=True)
    ours = [sum(of_query), torch.cat(of_key, 2), torch.cat(of_value, 2)]
    theirs = [gradient.transpose(1, 2) for gradient in gradients]
    for mine, right in zip(ours, [theirs[0][:, :, half:], *theirs[1:]], strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=BOUNDS[dtype] * 4)
