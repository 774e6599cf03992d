"""RMSNorm and attention against plain torch written out."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

from patch.model.attention import CausalAttention
from patch.model.norm import RMSNorm


def _attention(head_size: int, window_size: tuple[int, int] | None = None) -> CausalAttention:
    return CausalAttention(
        config=SimpleNamespace(kv_channels=head_size, window_size=window_size),
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
    )


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 7, 65])
@pytest.mark.parametrize("window", [None, 1, 7, 30, 65, 100])
def test_attention_equals_softmax_of_masked_scores(groups: int, length: int, window: int | None) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(length, 3, heads, 16) for heads in (4, groups, groups))
    repeated = [tensor.repeat_interleave(4 // groups, dim=2) for tensor in (key, value)]
    scores = torch.einsum("sbnd,tbnd->bnst", query, repeated[0]) / 4.0
    distance = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (distance < 0) | (distance >= (window or length))
    scores = scores.masked_fill(hidden, float("-inf"))
    expected = torch.einsum("bnst,tbnd->sbnd", scores.softmax(-1), repeated[1])
    context = _attention(16, window and (window - 1, 0))(query, key, value, None)
    torch.testing.assert_close(context, expected.reshape(length, 3, 64), rtol=1e-5, atol=1e-6)


def test_attention_scales_by_head_size_when_it_is_not_hidden_over_heads() -> None:
    query, key, value = torch.randn(3, 5, 1, 2, 24).unbind(0)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)), is_causal=True
    )
    context = _attention(24)(query, key, value, None)
    assert torch.equal(context, expected.permute(2, 0, 1, 3).reshape(5, 1, 48))


@pytest.mark.parametrize("is_sp", [False, True])
def test_norm_divides_by_the_root_mean_square_and_is_tagged(is_sp: bool) -> None:
    config = SimpleNamespace(use_cpu_initialization=True, params_dtype=torch.float32, sequence_parallel=is_sp)
    norm = RMSNorm(config, 64, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    hidden = torch.randn(5, 2, 64)
    expected = hidden / (hidden.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    torch.testing.assert_close(norm(hidden), expected)
    assert norm.weight.sequence_parallel is is_sp
