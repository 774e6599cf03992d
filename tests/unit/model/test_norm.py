"""The norms against transformers': outputs, gradients, and who must sum its gradient over TP."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from patch.model.norm import HeadRMSNorm, RMSNorm

FP32_BOUND = 1e-5
"""Relative, and absolute on values near 1: sums over 65 numbers in another order."""
BF16_BOUND = 2.0**-7
"""Relative: transformers also rounds before the product with the weight."""


def _config(dtype: torch.dtype = torch.float32, tp: int = 1, is_sp: bool = False) -> Any:
    sizes = {"sequence_parallel": is_sp, "tensor_model_parallel_size": tp}
    of_llama = {"use_cpu_initialization": True, "layernorm_zero_centered_gamma": False}
    return SimpleNamespace(**of_llama, params_dtype=dtype, **sizes)


def _pair(ours: type, theirs: type, size: int, eps: float, dtype: torch.dtype = torch.float32) -> tuple:
    norm, expected = ours(_config(dtype), size, eps=eps), theirs(size, eps).to(dtype)
    torch.nn.init.normal_(norm.weight, 1.0, 0.5)
    expected.weight.data.copy_(norm.weight.data)
    return norm, expected


@pytest.mark.parametrize(
    ("ours", "theirs", "shape"),
    [(RMSNorm, LlamaRMSNorm, (5, 2, 65)), (HeadRMSNorm, Qwen3RMSNorm, (5, 2, 3, 65))],
)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("eps", [1e-6, 1e-5])
def test_outputs_and_gradients_are_those_of_transformers(
    ours: type, theirs: type, shape: tuple, scale: float, eps: float
) -> None:
    """At a scale of 1e-4 the mean square is 1e-8: epsilon decides."""
    torch.manual_seed(0)
    norm, expected = _pair(ours, theirs, shape[-1], eps)
    hidden = (torch.randn(shape) * scale).requires_grad_()
    direction = torch.randn(shape)
    found = []
    for module in (norm, expected):
        output = module(hidden)
        found.append([output, *torch.autograd.grad((output * direction).sum(), [hidden, module.weight])])
    for mine, hers in zip(*found, strict=True):
        torch.testing.assert_close(mine, hers, rtol=FP32_BOUND, atol=FP32_BOUND * hers.abs().max().item())


def test_bf16_is_within_a_rounding_of_transformers_and_a_large_mean_square_does_not_overflow() -> None:
    torch.manual_seed(0)
    norm, expected = _pair(RMSNorm, LlamaRMSNorm, 64, 1e-5, torch.bfloat16)
    hidden = torch.randn(50, 2, 64, dtype=torch.bfloat16)
    assert norm(hidden).dtype == norm.weight.dtype == torch.bfloat16
    torch.testing.assert_close(norm(hidden), expected(hidden), rtol=BF16_BOUND, atol=0)
    hidden = torch.full((1, 1, 64), 60000.0, dtype=torch.float16)
    assert torch.equal(RMSNorm(_config(torch.float16), 64)(hidden), torch.ones_like(hidden))


@pytest.mark.parametrize(("tp", "is_sp"), [(1, False), (2, False), (2, True)])
def test_gradients_to_be_summed_over_tp_are_marked(tp: int, is_sp: bool) -> None:
    """Each TP rank sees its own tokens under sequence parallelism, and always its own heads."""
    config = _config(tp=tp, is_sp=is_sp)
    assert RMSNorm(config, 8).weight.sequence_parallel is is_sp
    assert HeadRMSNorm(config, 8).weight.sequence_parallel is (tp > 1)
