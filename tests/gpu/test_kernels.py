"""The kernels of a layer on a GPU: Triton against torch, and each attention backend against all scores."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from small_runs import small_run
from torch.nn import attention as torch_attention

from patch.config.backends import choose_backends
from patch.device import DeviceContext, MachineFacts
from patch.distributed.groups import initialize
from patch.model.attention import CausalAttention
from patch.model.backends import backends_on
from patch.model.kernels import layer_kernels
from patch.model.llama import transformer_config
from patch.model.loss import LearnedTokens, VocabularyPart, linear_cross_entropy

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SWIGLU_BOUND = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}
"""Relative; one unit of a number's last digit and, in fp32, another exp."""
BF16_BOUND = 0.03
"""Outputs and gradients are near 1; two kernels round bf16 in other places."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 1025, 14336])
def test_swiglu_is_torchs(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(0)
    gate_up = (4 * torch.randn(33, 2, 2 * width, device="cuda")).to(dtype)
    gradient = torch.randn(33, 2, width, device="cuda").to(dtype)
    bound = {"rtol": SWIGLU_BOUND[dtype], "atol": 1e-6}
    fused, plain = layer_kernels(True), layer_kernels(False)
    torch.testing.assert_close(fused.swiglu(gate_up), plain.swiglu(gate_up), **bound)
    found, expected = (kernels.swiglu_backward(gradient, gate_up) for kernels in (fused, plain))
    torch.testing.assert_close(found, expected, **bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("table_rows", [1, 2])
@pytest.mark.parametrize(("size", "groups", "queries"), [(128, 8, 4), (80, 3, 1), (96, 1, 16)])
def test_rope_has_torchs_bits(
    dtype: torch.dtype, table_rows: int, size: int, groups: int, queries: int
) -> None:
    torch.manual_seed(0)
    mixed = torch.randn(77, 2, groups, (queries + 2) * size, device="cuda").to(dtype)
    angles = 100 * torch.rand(77, table_rows, 1, size // 2, device="cuda")
    table = torch.stack((angles.cos(), angles.sin()))
    fused, plain = layer_kernels(True), layer_kernels(False)
    parts = fused.split_qkv(mixed, table)
    for found, expected in zip(parts, plain.split_qkv(mixed, table), strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(fused.join_qkv(*parts, table), plain.join_qkv(*parts, table))
    for back in (False, True):
        turned = (kernels.rotate(parts[0], table, back=back) for kernels in (fused, plain))
        assert torch.equal(*turned)


LOSS_BOUND = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}
"""Relative, of norms: logits are rounded to the type, then their gradients; fp32 has a GPU's exponential."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("words", "rows"), [(128256, 128256), (32003, 32003), (5120, 5003)])
def test_fused_loss_is_torchs(job: DeviceContext, dtype: torch.dtype, words: int, rows: int) -> None:
    group = initialize(small_run(), job).tp
    torch.manual_seed(0)
    hidden = torch.randn(33, 1, 64, device="cuda").to(dtype).requires_grad_()
    weight = torch.randn(words, 64, device="cuda").mul_(0.1).to(dtype).requires_grad_()
    labels = torch.randint(0, rows, (1, 33), device="cuda")
    labels[0, 3] = -100
    learned = LearnedTokens((labels >= 0).float(), 0.5)
    part = VocabularyPart(0, rows, group)
    loss = linear_cross_entropy(hidden, weight, labels, learned, part, is_fused=True, chunk=10)
    found = torch.autograd.grad(loss * 0.5, (hidden, weight))
    logits = (hidden.double() @ weight.double().t())[:, 0, :rows]
    expected = torch.nn.functional.cross_entropy(logits, labels[0], reduction="sum")
    torch.testing.assert_close(loss.double(), expected, rtol=LOSS_BOUND[dtype], atol=0)
    for ours, theirs in zip(found, torch.autograd.grad(expected * 0.5, (hidden, weight)), strict=True):
        error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
        assert error <= LOSS_BOUND[dtype], error


@pytest.mark.parametrize("wish", ["auto", "flash", "fused", "local"])
@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize(("size", "window"), [(64, None), (80, None), (128, None), (64, 32)])
def test_every_backend_attends_as_all_scores_do(
    job: DeviceContext, wish: str, is_deterministic: bool, size: int, window: int | None
) -> None:
    groups = initialize(small_run(), job)
    execution = small_run(precision="bf16", deterministic_mode=is_deterministic).execution
    torch.manual_seed(0)
    inputs = [
        torch.randn(200, 2, count, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for count in (8, 2, 2)
    ]
    direction = torch.randn(200, 2, 8 * size, device="cuda", dtype=torch.bfloat16)
    found = []
    torch.use_deterministic_algorithms(is_deterministic)
    try:
        for backend in (wish, "unfused"):
            model = dataclasses.replace(small_run().model, attention_backend=backend)
            upstream = transformer_config(model, groups, execution, cuda=True)
            backends = backends_on(job.device, model, execution, groups, upstream)
            is_active = torch_attention.current_flash_attention_impl() == "FA3"
            assert is_active == backends.has_flash_attention_3
            attention = CausalAttention(
                config=SimpleNamespace(kv_channels=size, window_size=window and (window - 1, 0)),
                layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self",
                kernels=backends.sdpa,
            )  # fmt: skip
            context = attention(*inputs, None)
            found.append([context, *torch.autograd.grad((context * direction).sum(), inputs)])
    finally:
        torch.use_deterministic_algorithms(False)
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=BF16_BOUND, atol=BF16_BOUND)


def test_fp32_with_grouped_heads_has_no_scores_in_memory() -> None:
    machine, run = MachineFacts.probe(), small_run(precision="fp32")
    attention = CausalAttention(
        config=SimpleNamespace(kv_channels=64, window_size=None), layer_number=1,
        attn_mask_type=AttnMaskType.causal, attention_type="self",
        kernels=choose_backends(run.model, run.execution, machine).sdpa,
    )  # fmt: skip
    inputs = [torch.randn(4096, 1, count, 64, device="cuda") for count in (8, 2, 2)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention(*inputs, None)
    assert torch.cuda.max_memory_allocated() - before < 8 * 4096 * 4096 * 4 / 2
