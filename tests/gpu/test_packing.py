"""Packed sequences on a GPU: torch's kernel for variable lengths against one sequence after the other."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

from patch.model import PackedSequences
from patch.model.attention import CausalAttention
from patch.model.varlen import takes_varlen

LENGTHS = [100, 1, 155, 256]
"""Of two rows of 256 tokens: three sequences, and one that fills its row."""
BF16_BOUND = 0.03
"""Outputs and gradients are near 1; two kernels round bf16 in other places."""


@pytest.mark.parametrize(("heads", "groups"), [(8, 8), (8, 2)])
@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_kernel_gives_what_each_sequence_gives_alone(
    heads: int, groups: int, window: int | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    inputs = [
        torch.randn(256, 2, count, 64, device="cuda", dtype=dtype, requires_grad=True)
        for count in (heads, groups, groups)
    ]
    attention = CausalAttention(
        config=SimpleNamespace(kv_channels=64, window_size=window and (window - 1, 0)), layer_number=1,
        attn_mask_type=AttnMaskType.causal, attention_type="self",
    )  # fmt: skip
    borders = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    packed = PackedSequences.of(borders, torch.empty(2, 256), torch.device("cuda"))
    assert takes_varlen(inputs[0]), "torch has no varlen_attn with a window here"
    direction = torch.randn(256, 2, heads * 64, device="cuda", dtype=dtype)
    found = []
    for attention.may_use_varlen in (True, False):
        context = attention(*inputs, None, packed_seq_params=packed)
        found.append([context, *torch.autograd.grad((context * direction).sum(), inputs)])
    for one_kernel, one_by_one in zip(*found, strict=True):
        torch.testing.assert_close(one_kernel, one_by_one, rtol=BF16_BOUND, atol=BF16_BOUND)
