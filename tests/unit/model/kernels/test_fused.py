"""The Triton kernels: their interpreter against torch's operations and autograd, and what a GPU would run."""

import re
from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from triton_interpreter import give_writer, interpreted, output_of_compiler, rounding

from patch.distributed.context_group import Zigzag
from patch.model import nf4_product
from patch.model.attention.ring_attention import RingAttention, RingKernels
from patch.model.attention.ring_tiles import Tile
from patch.model.weight_gradient import EmbeddingLookup

pytest.importorskip("triton.language", reason="Triton is not installed: pip install triton")

MODULE = "patch.model.kernels.fused"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SWIGLU_BOUND = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}
"""Relative; one unit of a number's last digit and, in fp32, another exp."""
MERGE_BOUND = 1e-6
"""Of numbers near 1, merged three times in float32."""
GELU_BOUND = 1e-5
"""Relative, in fp32: an exponential of what was rounded at 1e-7 of up to 100; and 1e-5 where terms cancel."""


@pytest.fixture(scope="module")
def fused():
    with interpreted(MODULE, rounding) as module:
        yield module


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 2, 74), (2, 1, 2 * 1025)], ids=str)
def test_swiglu_is_that_of_torch_and_its_autograd(fused, shape, dtype):
    torch.manual_seed(0)
    gate_up = (4 * torch.randn(shape)).to(dtype).requires_grad_()
    gate, up = gate_up.chunk(2, dim=-1)
    product = torch.nn.functional.silu(gate) * up
    direction = torch.randn_like(product)
    (gradient,) = torch.autograd.grad(product, gate_up, direction)
    bound = {"rtol": SWIGLU_BOUND[dtype], "atol": 1e-6}
    torch.testing.assert_close(fused.swiglu(gate_up.detach()), product, **bound)
    torch.testing.assert_close(fused.swiglu_backward(direction, gate_up.detach()), gradient, **bound)


@pytest.mark.parametrize("number", [0.0, -3e4, float("-inf"), float("nan")])
def test_swiglu_finds_the_largest_number_that_it_writes(fused, number):
    torch.manual_seed(0)
    gate_up, gradient = torch.randn(3, 2, 2 * 1025).bfloat16(), torch.randn(3, 2, 1025).bfloat16()
    gate_up[2, 1, -1] = gradient[1, 0, 7] = number
    for kernel, arguments in ((fused.swiglu, (gate_up,)), (fused.swiglu_backward, (gradient, gate_up))):
        written, amax = kernel(*arguments), torch.zeros(())
        torch.testing.assert_close(kernel(*arguments, amax), written, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(amax, written.abs().max().float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (3, 74), (2, 2 * 1025)], ids=str)
def test_weighted_swiglu_is_that_of_torch_and_its_autograd(fused, shape, dtype):
    torch.manual_seed(0)
    gate_up = (4 * torch.randn(shape)).to(dtype)
    wide, weights = gate_up.double().requires_grad_(), torch.rand(shape[0], requires_grad=True)
    gate, up = wide.chunk(2, dim=-1)
    active = torch.nn.functional.silu(gate) * up * weights.unsqueeze(-1).double()
    direction, of_weights = torch.randn_like(active).to(dtype), torch.empty(shape[0])
    expected = *torch.autograd.grad(active, (wide, weights), direction.double()), active
    forward = fused.weighted_swiglu(gate_up, weights.detach())
    gradient, again = fused.weighted_swiglu_backward(direction, gate_up, weights.detach(), of_weights)
    assert torch.equal(forward, again)
    for ours, theirs in zip((gradient, of_weights, again), expected, strict=True):
        assert (ours.double() - theirs).norm() <= 2 * SWIGLU_BOUND[dtype] * theirs.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 37), (2, 1, 1025)], ids=str)
def test_bias_and_gelu_are_those_of_torch_and_its_autograd(fused, shape, dtype):
    torch.manual_seed(0)
    hidden, bias, direction = ((4 * torch.randn(size)).to(dtype) for size in (shape, shape[-1:], shape))
    total = (hidden + bias).double().requires_grad_()
    active = torch.nn.functional.gelu(total, approximate="tanh")
    (gradient,) = torch.autograd.grad(active, total, direction.double())
    bound = {"rtol": max(GELU_BOUND, SWIGLU_BOUND[dtype]), "atol": 1e-5}
    found = fused.bias_gelu(hidden, bias), fused.bias_gelu_backward(direction, hidden, bias)
    for ours, expected in zip(found, (active, gradient), strict=True):
        torch.testing.assert_close(ours.double(), expected.detach(), **bound)


def upstream(heads: torch.Tensor, angles: torch.Tensor, factor: float) -> torch.Tensor:
    """megatron-core's RoPE by angles [S, B or 1, 1, D / 2]."""
    return _apply_rotary_pos_emb_bshd(heads, torch.cat((angles, angles), dim=-1), mscale=factor)


def inputs(
    dtype: torch.dtype, size: int, table_rows: int, *heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    angles = 100 * torch.rand(5, table_rows, 1, size // 2)
    table = torch.stack((angles.cos(), angles.sin())) * 1.2
    return torch.randn(5, 2, *heads).to(dtype), angles, table


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("size", "heads", "table_rows"), [(64, 3, 1), (80, 4, 2), (96, 1, 2), (6, 5, 1)])
def test_rotated_heads_have_upstreams_bits(fused, dtype, size, heads, table_rows):
    given, angles, table = inputs(dtype, size, table_rows, heads, size)
    given.requires_grad_()
    expected = upstream(given, angles, 1.2)
    assert torch.equal(fused.rotate(given.detach(), table, back=False), expected)
    direction = torch.randn_like(expected)
    (gradient,) = torch.autograd.grad(expected, given, direction)
    assert torch.equal(fused.rotate(direction, table, back=True), gradient)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("size", "groups", "queries", "table_rows"), [(64, 2, 4, 1), (80, 3, 1, 2), (96, 1, 3, 1), (6, 2, 7, 2)]
)
def test_split_and_joined_qkv_have_upstreams_bits(fused, dtype, size, groups, queries, table_rows):
    given, angles, table = inputs(dtype, size, table_rows, groups, (queries + 2) * size)
    given.requires_grad_()
    query, key, value = given.split([queries * size, size, size], dim=-1)
    expected = [
        upstream(query.reshape(5, 2, -1, size), angles, 1.2), upstream(key, angles, 1.2), value,
    ]  # fmt: skip
    for found, right in zip(fused.split_qkv(given.detach(), table), expected, strict=True):
        assert found.is_contiguous() and torch.equal(found, right)
    directions = [torch.randn_like(part) for part in expected]
    (gradient,) = torch.autograd.grad(expected, given, directions)
    assert torch.equal(fused.join_qkv(*directions, table), gradient)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 64), (5, 64 * 19)], ids=str)
def test_numbers_of_4_bits_have_torchs_bits(fused, shape, dtype):
    torch.manual_seed(0)
    packed = nf4_product.quantize(torch.randn(shape).exp().sub(1))
    weight = torch.empty(shape, dtype=dtype)
    scales = nf4_product._scales_of(packed, shape[1])
    fused.dequantize_nf4(packed, scales, nf4_product._tables(packed.device).levels, weight)
    assert torch.equal(weight, nf4_product.dequantize(packed, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [128, 80, 6])
def test_merged_attention_is_that_to_all_keys(fused, dtype, size):
    """The last of 41 queries meet two parts more than the others; what is not there yet is NaN."""
    torch.manual_seed(0)
    out = torch.full((41, 2, 3, size), torch.nan).permute(1, 2, 0, 3)
    lse = torch.full((2, 3, 41), -torch.inf)
    weights, values = torch.zeros(3, 2, 3, 41, dtype=torch.float64), torch.zeros(3, *out.shape)
    for index, first in enumerate((0, 20, 20)):
        part = torch.randn(2, 41 - first, 3, size).to(dtype).transpose(1, 2)
        part_lse = 20 * torch.randn(2, 3, 41 - first)
        fused.merge_attention(out[:, :, first:], lse[:, :, first:], part, part_lse)
        weights[index, :, :, first:], values[index, :, :, first:] = part_lse.double().exp(), part.float()
    expected = (weights[..., None] * values).sum(0) / weights.sum(0)[..., None]
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=MERGE_BOUND)
    torch.testing.assert_close(lse.double(), weights.sum(0).log(), rtol=MERGE_BOUND, atol=MERGE_BOUND)


def test_a_ring_attends_with_the_kernel(fused):
    """Some keys are in several tiles, and count as often."""
    tiles = [Tile(slice(None), slice(0, 24), slice(0, 24), is_causal=True)]
    tiles += [Tile(slice(None), slice(begin, 24), slice(begin)) for begin in (9, 17)]
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 24, 12)
    group, kernels = SimpleNamespace(zigzag=Zigzag(0, 1)), RingKernels(0.3, is_fused=True)
    out = RingAttention.apply(query, key, value, group, lambda source: tiles, kernels)
    times = torch.ones(24, 24).tril()
    for tile in tiles[1:]:
        times[tile.queries, tile.keys] += 1
    expected = (query @ key.mT * 0.3 + times.log()).softmax(-1) @ value
    torch.testing.assert_close(out, expected, rtol=0, atol=MERGE_BOUND)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [300, 17])
def test_an_embeddings_gradient_is_added_to_the_main_gradient_row_by_row(fused, dtype, width):
    """One token many times, some of other ranks (outside of the 50 rows); two micro-batches."""
    torch.manual_seed(0)
    weight, total = torch.randn(50, width).to(dtype).requires_grad_(), torch.full((50, width), torch.nan)
    give_writer(weight, total)
    expected = torch.zeros(50, width, dtype=torch.float64)
    for _ in range(2):
        tokens, direction = torch.randint(-9, 60, (3, 40)), torch.randn(3, 40, width).to(dtype)
        tokens[:, 7:30] = 4
        rows, is_own = EmbeddingLookup.apply(tokens, weight, True), (tokens >= 0) & (tokens < 50)
        assert torch.equal(rows, torch.where(is_own[..., None], weight[tokens.clamp(0, 49)], 0))
        rows.backward(direction)
        expected.index_add_(0, tokens[is_own], direction[is_own].double())
    assert not weight.grad.any(), "stand-ins"
    torch.testing.assert_close(total.double(), expected, rtol=2e-6, atol=1e-5)


COMPILE = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from patch.model.kernels import fused

INTS = {"width", "table_rows", "blocks", "token_stride", "head_stride", "queries"}
INTS |= {"code_stride", "scale_stride"}
SIZES = {"_rotate": (32, 64, 32, 64), "_qkv": (8, 4, 64, 8, 64, True), "_merge_attention": (32, 128, 16, 128)}
NAMES = ("_swiglu", "_swiglu_backward", "_bias_gelu", "_bias_gelu_backward", "_rotate", "_qkv",
         "_dequantize_nf4", "_weighted_swiglu", "_weighted_swiglu_backward", "_merge_attention",
         "_add_rows")
TABLES = {"table": "*fp32", "levels": "*fp32", "scales": "*fp32", "codes": "*u8", "amax": "*i32"}
TABLES |= dict.fromkeys(("weights", "of_weights", "out", "lse", "part_lse", "total"), "*fp32")
TABLES |= dict.fromkeys(("numbers", "order", "ends"), "*i64")
for name, kind in [(n, k) for n in NAMES for k in ("bf16", "fp32")]:
    kernel = getattr(fused, name)
    fixed = {"back": True, "sizes": SIZES.get(name)} | ({"amax": None} if kind == "fp32" else {})
    TABLES["rows"] = "*" + kind if name == "_add_rows" else "i32"
    fixed |= {"width": 4096} if name == "_weighted_swiglu_backward" else {}
    known = dict.fromkeys(INTS, "i32") | dict.fromkeys(fixed, "constexpr") | TABLES
    signature = {a: known.get(a, "*" + kind) for a in kernel.arg_names}
    constants = {a: fixed[a] for a in kernel.arg_names if a in fixed}
    attributes = {(i,): [["tt.divisibility", 16]] for i, a in enumerate(kernel.arg_names) if a not in fixed}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"enable_fp_fusion": False}
    print(name, kind)
    print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
"""


def test_compiled_for_a_hopper_gpu_nothing_is_fused_and_loads_are_wide():
    """Of numbers in 4 bits a thread loads 4 bytes, so its stores are the wide ones."""
    ptx = output_of_compiler(COMPILE)
    kernels = re.split(r"^(_\w+ (?:bf16|fp32))$", ptx, flags=re.MULTILINE)[1:]
    assert len(kernels) == 2 * 22
    for name, code in zip(kernels[::2], kernels[1::2], strict=True):
        assert not re.findall(r"fma\.rn\.f32|div\.full|\.local", code), name
        wide = "st" if "nf4" in name else "ld"
        assert re.search(rf"{wide}\.global\.v[24]", code), name
