"""Attention against transformers' eager attention: outputs and gradients."""

import sys
from functools import wraps
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as eager_capped
from transformers.models.llama.modeling_llama import eager_attention_forward

from patch.model import PackedSequences
from patch.model.attention.core_attention import CausalAttention
from patch.model.backends import failing_kernels

HEAD_SIZE = 12
"""No power of two, so that the scale is rounded."""
FP32_BOUND = 5e-6
"""Outputs and gradients are near 1; a fused kernel sums over 33 tokens in another order."""


def _seen(length: int, window: int | None) -> torch.Tensor:
    """Boolean mask [S, S] by transformers' own rule: query, visible key."""
    rule = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    rows, columns = torch.arange(length)[:, None], torch.arange(length)[None]
    return rule(0, 0, rows, columns)


def _eager(
    inputs: list[torch.Tensor], window: int | None, scale: float, cap: float | None = None
) -> torch.Tensor:
    """transformers' attention of [S, B, heads, D]; [S, B, N * D] out."""
    query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in inputs)
    module = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1], training=False)
    mask = torch.zeros(query.shape[2], query.shape[2]).masked_fill(~_seen(query.shape[2], window), -torch.inf)
    if cap is None:
        context, _ = eager_attention_forward(module, query, key, value, mask, scaling=scale)
    else:
        context, _ = eager_capped(module, query, key, value, mask, scaling=scale, softcap=cap)
    return context.transpose(0, 1).flatten(2)


def _ours(window: int | None, softmax_scale: float | None) -> CausalAttention:
    return CausalAttention(
        config=SimpleNamespace(kv_channels=HEAD_SIZE, window_size=window and (window - 1, 0)), layer_number=1,
        attn_mask_type=AttnMaskType.causal, attention_type="self", softmax_scale=softmax_scale,
    )  # fmt: skip


def _check(context: torch.Tensor, expected: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    """An output and its gradients of the inputs."""
    torch.testing.assert_close(context, expected, rtol=0, atol=FP32_BOUND)
    direction = torch.randn(expected.shape)
    gradients, theirs = (torch.autograd.grad((of * direction).sum(), inputs) for of in (context, expected))
    torch.testing.assert_close(gradients, theirs, rtol=0, atol=FP32_BOUND * 4)


@pytest.mark.parametrize(("heads", "groups"), [(6, 6), (6, 2), (3, 1)])
@pytest.mark.parametrize("length", [1, 7, 33])
@pytest.mark.parametrize("window", [None, 1, 5, 33, 50])
def test_outputs_and_gradients_are_those_of_transformers(heads, groups, length, window) -> None:
    torch.manual_seed(0)
    shapes = [(length, 2, count, HEAD_SIZE) for count in (heads, groups, groups)]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    for softmax_scale in (None, 0.7):
        expected = _eager(inputs, window, softmax_scale or HEAD_SIZE**-0.5)
        _check(_ours(window, softmax_scale)(*inputs, None), expected, inputs)


BORDERS = [0, 7, 8, 20, 24, 48]
"""Of two rows of 24 tokens: one token, four sequences in the first row, one that fills the second."""


def _packed(rows: int, length: int) -> PackedSequences:
    borders = torch.tensor(BORDERS, dtype=torch.int32)
    packed = PackedSequences.of(borders, torch.empty(rows, length), torch.device("cpu"))
    assert packed is not None
    return packed


@pytest.mark.parametrize(("heads", "groups"), [(6, 6), (6, 2)])
@pytest.mark.parametrize("window", [None, 1, 5, 24])
def test_packed_sequences_attend_as_each_alone_in_transformers(heads, groups, window) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(24, 2, count, HEAD_SIZE, requires_grad=True) for count in (heads, groups, groups)]
    context = _ours(window, None)(*inputs, None, packed_seq_params=_packed(2, 24))
    tokens = [tensor.transpose(0, 1).flatten(0, 1)[:, None] for tensor in inputs]  # [B * S, 1, heads, D]
    sequences = ([tensor[begin:end] for tensor in tokens] for begin, end in pairwise(BORDERS))
    alone = [_eager(sequence, window, HEAD_SIZE**-0.5) for sequence in sequences]
    _check(context, torch.cat(alone).view(2, 24, -1).transpose(0, 1), inputs)


def test_positions_begin_again_at_each_border() -> None:
    packed = _packed(2, 24)
    expected = [position for begin, end in pairwise(BORDERS) for position in range(end - begin)]
    assert packed.position_ids.flatten().tolist() == expected
    assert packed.lengths == [7, 1, 12, 4, 24] and packed.max_seqlen_q == packed.max_seqlen_kv == 24
    assert PackedSequences.of(None, torch.empty(2, 24), torch.device("cpu")) is None


class NoPlan(TorchDispatchMode):
    """The fused kernel of the CPU fails in backward, which torch cannot know before."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation._schema.name == "aten::_scaled_dot_product_flash_attention_for_cpu_backward":
            raise RuntimeError("no plan\nat a line")
        return operation(*args, **(kwargs or {}))


def test_kernels_that_raise_at_a_runs_shape_are_found_before_it_begins(recwarn) -> None:
    """On a CPU torch has one fused kernel; the others it skips by itself, as that one for odd groups."""
    config = SimpleNamespace(
        tensor_model_parallel_size=2, context_parallel_size=1, num_query_groups=2, num_attention_heads=8,
        kv_channels=HEAD_SIZE, window_size=None, params_dtype=torch.bfloat16,
    )  # fmt: skip
    odd = SimpleNamespace(**vars(config) | {"num_query_groups": 6})
    kernels = ("cudnn", "flash", "efficient", "math")
    assert not failing_kernels(kernels, config, 33, HEAD_SIZE, torch.device("cpu"))
    assert not failing_kernels(kernels, odd, 33, HEAD_SIZE, torch.device("cpu"))
    assert not recwarn.list
    with NoPlan():
        assert failing_kernels(kernels, config, 33, HEAD_SIZE, torch.device("cpu")) == {"flash": "no plan"}


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """flash-attn 2.8.3's function of [B, S, heads, D] over transformers' attention, forward only."""
    assert causal and not dropout_p and alibi_slopes is None and not return_attn_probs
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    left, right = window_size
    assert right in (-1, 0)
    rows_second = [tensor.transpose(0, 1).float() for tensor in (q, k, v)]
    context = _eager(rows_second, None if left == -1 else left + 1, softmax_scale, softcap or None)
    return context.transpose(0, 1).unflatten(2, (q.shape[2], -1)).to(q.dtype)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
    causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
    return_attn_probs=False, block_table=None,
):  # fmt: skip
    """flash-attn 2.8.3's function of [T, heads, D]."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32 and block_table is None
    assert max_seqlen_q == max_seqlen_k == cu_seqlens_q.diff().max()
    rest = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    sequences = (slice(*borders) for borders in pairwise(cu_seqlens_q.tolist()))
    parts = [flash_attn_func(q[each][None], k[each][None], v[each][None], *rest)[0] for each in sequences]
    return torch.cat(parts)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("cap", [None, 0.5])
def test_the_package_flash_attn_attends_as_torch_does(monkeypatch, window, is_packed, cap) -> None:
    """A stand-in has the signatures of the package's source; the package itself has never run here."""
    calls = []
    package = ModuleType("flash_attn")
    for function in (flash_attn_func, flash_attn_varlen_func):

        @wraps(function)
        def counted(*arguments, _function=function, **named):
            calls.append(_function.__name__)
            return _function(*arguments, **named)

        setattr(package, function.__name__, counted)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    torch.manual_seed(0)
    inputs = [torch.randn(24, 2, heads, 16).bfloat16().requires_grad_() for heads in (6, 2, 2)]
    packed = _packed(2, 24) if is_packed else None
    found = []
    for kernels in (("flash_attn", "flash"), ()):
        attention = CausalAttention(
            config=SimpleNamespace(kv_channels=16, window_size=window and (window - 1, 0)), layer_number=1,
            attn_mask_type=AttnMaskType.causal, attention_type="self", kernels=kernels, cap=cap,
        )  # fmt: skip
        context = attention(*inputs, None, packed_seq_params=packed)
        found.append([context, *torch.autograd.grad(context.float().square().sum(), inputs)])
    torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)
    assert "flash_attn_varlen_func" in calls if is_packed else calls == ["flash_attn_func"]


def test_a_package_flash_attn_that_fails_is_named(monkeypatch) -> None:
    package = ModuleType("flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    config = SimpleNamespace(
        tensor_model_parallel_size=1, context_parallel_size=1, num_query_groups=2, num_attention_heads=8,
        kv_channels=16, window_size=None, params_dtype=torch.bfloat16,
    )  # fmt: skip
    for name, reason in (("another", "no attribute"), ("flash_attn_func", "unexpected keyword argument")):
        setattr(package, name, lambda q, k, v: q)
        found = failing_kernels(("flash_attn", "math"), config, 33, 16, torch.device("cpu"))
        assert found.keys() == {"flash_attn"} and reason in found["flash_attn"]
