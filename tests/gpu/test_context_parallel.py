"""The attention kernels of context parallelism on a GPU: pieces of keys against all keys at once."""

import pytest
import torch
import torch.nn.functional as F

from patch.compat.attention_kernels import attend_backward, attend_with_lse

LENGTH, SCALE = 100, 0.125
BOUNDS = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.03}
"""Outputs and gradients are near 1; two kernels round in other places."""


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("heads", "groups"), [(8, 8), (8, 2)])
@pytest.mark.parametrize("window", [None, 60])
def test_pieces_of_keys_give_what_all_keys_give(
    dtype: torch.dtype, heads: int, groups: int, window: int | None
) -> None:
    """The last tokens are the queries: they see all of the first piece, and the second one causally."""
    torch.manual_seed(0)
    shapes = [(2, count, LENGTH, 64) for count in (heads, groups, groups)]
    whole, key, value = (
        torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes
    )
    half = LENGTH // 2
    query = whole[:, :, half:]
    visible = (
        torch.ones(half, LENGTH, dtype=torch.bool, device="cuda")
        .tril(half)
        .triu(half - (window or LENGTH) + 1)
    )
    expected = F.scaled_dot_product_attention(
        query.float(), key.float(), value.float(), visible, scale=SCALE, enable_gqa=True
    )
    direction = torch.randn_like(query)
    gradients = torch.autograd.grad((expected * direction).sum(), (whole, key, value))

    bias = torch.zeros(half, LENGTH, device="cuda", dtype=dtype).masked_fill_(~visible, -torch.inf)
    pieces = []
    for part, is_causal in ((slice(0, half), False), (slice(half, LENGTH), True)):
        mask = None if window is None else bias[:, part]
        pieces.append((key[:, :, part], value[:, :, part], mask, is_causal and window is None))
    with torch.no_grad():
        found = [attend_with_lse(query, k, v, b, is_causal=c, scale=SCALE) for k, v, b, c in pieces]
        lse = torch.logsumexp(torch.stack([lse for _, lse in found]), 0)
        out = sum(part * (part_lse - lse).exp()[..., None] for part, part_lse in found).to(dtype)
        torch.testing.assert_close(out.float(), expected, rtol=0, atol=BOUNDS[dtype])
        parts = [
            attend_backward(direction, query, k, v, b, out, lse, is_causal=c, scale=SCALE)
            for k, v, b, c in pieces
        ]
    of_query, of_key, of_value = zip(*parts, strict=True)
    ours = [sum(of_query), torch.cat(of_key, 2), torch.cat(of_value, 2)]
    for mine, theirs in zip(ours, [gradients[0][:, :, half:], *gradients[1:]], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=BOUNDS[dtype] * 4)
