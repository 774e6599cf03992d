"""The kernels of a layer on a GPU: Triton against torch, products in 8 bits and with an epilogue."""

from collections.abc import Callable
from functools import partial, reduce

import pytest
import torch
from gpu.runs import gigabytes_a_second, needs_8_bits
from small_runs import small_run

from patch.compat import cublaslt
from patch.config.choices import Fp8Format
from patch.device import DeviceContext, MachineFacts
from patch.distributed.groups import initialize
from patch.families import Traits
from patch.model.experts.grouped import GroupedExperts
from patch.model.experts.layer import _Experts
from patch.model.fp8 import matrix as fp8_matrix
from patch.model.fp8.product import Fp8Product, StepWeights
from patch.model.kernels import layer_kernels
from patch.model.loss import LossMask, VocabularyShard, linear_cross_entropy
from patch.model.mlp import activation_of, swiglu
from patch.model.nf4_product import Nf4Product, dequantize, quantize
from patch.model.weight_gradient import add_product, has_epilogue

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SWIGLU_BOUND = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}
"""Relative; one unit of a number's last digit and, in fp32, another exp."""


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
@pytest.mark.parametrize("width", [1, 1025, 4096])
def test_bias_and_gelu_are_torchs(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(0)
    hidden = (4 * torch.randn(33, 2, width, device="cuda")).to(dtype).requires_grad_()
    bias = torch.randn(width, device="cuda").to(dtype).requires_grad_()
    bloom, found = Traits(gated_linear_unit=False, activation="gelu_pytorch_tanh", add_bias_linear=True), []
    gelu = partial(torch.nn.functional.gelu, approximate="tanh")
    for active in (activation_of(bloom, gelu, is_fused=True)(hidden, bias), gelu(hidden + bias)):
        found.append([active, *torch.autograd.grad(active.square().sum(), (hidden, bias))])
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).float().norm() <= 2 * SWIGLU_BOUND[dtype] * theirs.float().norm()


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
    learned = LossMask((labels >= 0).float(), 0.5)
    part = VocabularyShard(0, rows, group)
    loss = linear_cross_entropy(hidden, weight, labels, learned, part, is_fused=True, chunk=10)
    found = torch.autograd.grad(loss * 0.5, (hidden, weight))
    logits = (hidden.double() @ weight.double().t())[:, 0, :rows]
    expected = torch.nn.functional.cross_entropy(logits, labels[0], reduction="sum")
    torch.testing.assert_close(loss.double(), expected, rtol=LOSS_BOUND[dtype], atol=0)
    for ours, theirs in zip(found, torch.autograd.grad(expected * 0.5, (hidden, weight)), strict=True):
        error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
        assert error <= LOSS_BOUND[dtype], error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_epilogue_of_a_product_adds_up_in_fp32(dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    assert has_epilogue(device, dtype, torch.float32)
    torch.manual_seed(5)
    total, exact = torch.full((24, 40), torch.nan, device=device), torch.zeros(24, 40).double()
    for index in range(8):
        a, b = torch.randn(33, 24).to(dtype), torch.randn(33, 40).to(dtype)
        exact += a.double().t() @ b.double()
        add_product(total, a.to(device).t(), b.to(device), overwrite=index == 0)
    assert ((total.cpu().double() - exact).norm() / exact.norm()).item() < 1e-6


@pytest.mark.skipif(
    MachineFacts.probe().compute_capability[0] != 9, reason="grouped products are used on Hopper alone"
)
@pytest.mark.parametrize("sizes", [[256, 0, 513, 7], [0, 776, 0, 0]], ids=["one idle", "one has all"])
def test_grouped_products_are_single_ones_and_the_host_waits_for_none(sizes: list[int]) -> None:
    torch.manual_seed(0)
    memory = [torch.randn(4, *shape, device="cuda").bfloat16() for shape in ((1408, 512), (512, 704))]
    matrices = [matrix.requires_grad_() for whole in memory for matrix in whole.unbind()]
    tokens = torch.randn(sum(sizes), 512, device="cuda").bfloat16().requires_grad_()
    weights = torch.rand(sum(sizes), device="cuda").requires_grad_()
    ends = torch.tensor(sizes, device="cuda").cumsum(0, dtype=torch.int32)
    activate, inputs, found = partial(swiglu, is_fused=True), [tokens, weights, *matrices], []
    gradient = torch.randn(tokens.shape, device="cuda").bfloat16()
    grouped = GroupedExperts, (ends, None)
    for compute, where in (grouped, (_Experts, (sizes,)), grouped):
        # The first call may load kernels; memory that it frees is full of numbers.
        torch.cuda.set_sync_debug_mode("error" if len(found) == 2 else "default")
        try:
            output = compute.apply(tokens, weights, *where, activate, *matrices)
            found.append([output, *torch.autograd.grad(output, inputs, gradient)])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for ours, single in zip(found[2], found[1], strict=True):
        assert (ours - single).float().norm() <= 2**-7 * single.float().norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_of_a_vocabulary_are_added_up_always_in_the_same_order(
    figure: Callable[[str, object], None], dtype: torch.dtype
) -> None:
    from patch.model.kernels.fused import add_rows

    torch.manual_seed(0)
    rows, numbers = torch.randn(8192, 4096, device="cuda").to(dtype), torch.randint(-1, 9000, (8192,)).cuda()
    numbers[:900] = 7
    totals = [torch.ones(9000, 4096, device="cuda") for _ in range(2)]
    for total in totals:
        add_rows(total, numbers, rows)
    expected = torch.ones(9000, 4096, device="cuda", dtype=torch.float64)
    expected.index_add_(0, numbers[numbers >= 0], rows[numbers >= 0].double())
    assert torch.equal(*totals)
    torch.testing.assert_close(totals[0].double(), expected, rtol=1e-5, atol=1e-5)
    num_bytes = rows.nbytes + 2 * 4 * 4096 * len(numbers.unique())
    for name, work in (
        ("add_rows", lambda: add_rows(totals[0], numbers, rows)),
        ("index_add_", lambda: totals[0].index_add_(0, numbers.clamp(min=0), rows.float())),
    ):
        figure(f"{name}, 8192 rows of {dtype}", gigabytes_a_second(work, num_bytes))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_parts_of_ranks_have_the_bits_of_additions(
    figure: Callable[[str, object], None], dtype: torch.dtype
) -> None:
    from patch.distributed.part_sums import add_parts

    torch.manual_seed(0)
    parts = torch.randn(8, (1 << 23) + 5, device="cuda").mul_(torch.rand(8, 1, device="cuda")).to(dtype)
    wide, out = torch.empty(parts.shape[1], device="cuda"), torch.empty_like(parts[0])
    add_parts(parts, wide)
    assert torch.equal(wide, reduce(torch.add, parts.float()))
    add_parts(torch.cat((parts[:3], parts[4:])), out, own=parts[3], rank=3)
    assert torch.equal(out, reduce(torch.add, parts))
    size = parts.nbytes + wide.nbytes
    figure(f"sum of 8 parts, {dtype}", gigabytes_a_second(lambda: add_parts(parts, wide), size))
    figure(f"by torch, {dtype}", gigabytes_a_second(lambda: reduce(torch.add, parts), size))


def eight_bit_results(form: Fp8Format, device: str) -> list[torch.Tensor]:
    """Output and both gradients of a layer; the tokens are no multiple of 16."""
    torch.manual_seed(0)
    x, w, g = (
        torch.randn(*shape).bfloat16().to(device) for shape in ((75, 3, 256), (512, 256), (75, 3, 512))
    )
    x.requires_grad_(), w.requires_grad_()
    step = StepWeights(form, keeps_weights=True)
    with step.unchanged():
        output = Fp8Product(step, keeps_input=False).of(None)(x, w)
        output.backward(g)
    return [tensor.detach().float().cpu() for tensor in (output, x.grad, w.grad)]


@needs_8_bits
@pytest.mark.parametrize("form", ["hybrid", "e4m3"])
def test_8_bit_products_are_those_of_the_cpu(form: Fp8Format) -> None:
    """Relative to the largest number: Hopper's forward sums with fewer bits, and results are bfloat16."""
    for ours, theirs in zip(eight_bit_results(form, "cuda"), eight_bit_results(form, "cpu"), strict=True):
        assert (ours - theirs).abs().max() <= 0.01 * theirs.abs().max()


@needs_8_bits
@pytest.mark.parametrize("kind", [torch.float8_e5m2, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(
    ("outputs", "inputs", "tokens", "offset"),
    [(48, 16, 75, 4), (6144, 4096, 8192, 0), (28672, 4096, 1000, 0), (4096, 14336, 100, 0)],
)
def test_8_bit_products_add_up_in_fp32(
    kind: torch.dtype, outputs: int, inputs: int, tokens: int, offset: int
) -> None:
    """Not rounded to bfloat16, which differs by 1.6e-3; in one memory with what begins at 16 bytes."""
    device = torch.device("cuda", torch.cuda.current_device())
    assert cublaslt.obstacle(device, kind) == ""
    torch.manual_seed(0)
    total = torch.full((outputs * inputs + offset,), torch.nan, device=device)[offset:].view(outputs, inputs)
    theirs, exact = torch.zeros_like(total), torch.zeros_like(total).double()
    for index in range(2):
        both = [(outputs, kind), (inputs, torch.float8_e4m3fn)]
        a, b = (
            fp8_matrix.quantize_operands(torch.randn(tokens, n, device=device).bfloat16(), dtype).columns
            for n, dtype in both
        )
        fp8_matrix.add_product(total, a, b, torch.bfloat16, overwrite=index == 0)
        theirs += fp8_matrix.product(a, b, torch.float32)
        exact += (a.values.double() @ b.values.double().t()) * (a.scale_inv * b.scale_inv)
    assert (total - theirs).norm() <= 1e-6 * theirs.norm()
    assert (total - exact).norm() <= 1e-3 * exact.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [64, 1088, 14336])
def test_numbers_of_4_bits_are_torchs_and_those_of_bitsandbytes(
    figure: Callable[[str, object], None], dtype: torch.dtype, columns: int
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(4096, columns, device="cuda").to(dtype)
    packed, on_cpu = quantize(weight), quantize(weight[:64].cpu())
    dense = dequantize(packed, dtype)
    assert torch.equal(packed[:64].cpu(), on_cpu)
    assert torch.equal(dense[:64].cpu(), dequantize(on_cpu, dtype))
    name, size = f"4096 x {columns} of 4 bits made {dtype}", packed.nbytes + dense.nbytes
    figure(name, gigabytes_a_second(lambda: dequantize(packed, dtype), size))
    functional = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed").functional
    codes = packed[:, : columns // 2].reshape(-1, 1)
    scales = packed[:, columns // 2 :].reshape(-1).view(torch.float32)
    state = functional.QuantState(
        scales, shape=dense.shape, blocksize=64, quant_type="nf4", dtype=dtype,
        code=functional.get_4bit_type("nf4", device="cuda"),
    )  # fmt: skip
    theirs = partial(functional.dequantize_4bit, codes, state)
    assert torch.equal(dense, theirs())
    figure(f"{name}, bitsandbytes", gigabytes_a_second(theirs, size))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_4_bit_product_is_that_of_the_dense_weight(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(96, 320, device="cuda").to(dtype))
    packed = quantize(weight.detach())
    product = Nf4Product("nf4").of(weight)
    weight.copy_(packed)
    input, found = torch.randn(33, 2, 320, device="cuda").to(dtype).requires_grad_(), []
    for output in (product(input, weight), input @ dequantize(packed, dtype).t()):
        found.append([output, *torch.autograd.grad(output.square().sum(), input)])
    torch.testing.assert_close(*found)
