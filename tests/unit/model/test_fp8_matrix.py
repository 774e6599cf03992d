"""8-bit matrices and their products against rounding and sums written out in float64."""

import math

import pytest
import torch

from patch.model.fp8.matrix import product, quantize, transposed

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
MANTISSA_BITS = {E4M3: 3, E5M2: 2}
SMALLEST_EXPONENT = {E4M3: -6, E5M2: -14}
"""Of normal numbers. The formats are those of Micikevicius et al., arXiv:2209.05433, table 1."""
SUM_BOUND = 2e-6
"""Relative to the sum of the absolute terms: at most 130 float32 additions in another order."""


def scale_of(numbers: torch.Tensor, dtype: torch.dtype) -> float:
    """The largest power of two by which no number leaves the range."""
    return 2.0 ** math.floor(math.log2(LARGEST[dtype] / numbers.abs().max().item()))


def rounded(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Float64 numbers to the nearest of the format's, ties to even; the same type."""
    exponents = torch.frexp(numbers.abs()).exponent - 1
    step = torch.exp2(exponents.clamp_min(SMALLEST_EXPONENT[dtype]).double() - MANTISSA_BITS[dtype])
    return torch.round(numbers / step) * step


def emulated(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a matrix becomes by quantization, as float64."""
    numbers = numbers.double()
    return rounded(numbers * (scale := scale_of(numbers, dtype)), dtype) / scale


def numbers_of(matrix) -> torch.Tensor:
    return matrix.values.double() * matrix.scale_inv.double()


def normal(rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Rows and columns of very different size, and numbers that 8 bits cannot hold beside the largest."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, columns, generator=generator)
    sizes = torch.randn(rows, 1, generator=generator) + torch.randn(1, columns, generator=generator)
    return (matrix * torch.exp2(3 * sizes)).to(dtype)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_numbers_are_rounded_to_the_nearest(source: torch.dtype, dtype: torch.dtype) -> None:
    matrix = normal(37, 53, source)
    found = quantize(matrix, dtype)
    assert found.values.dtype == dtype and found.scale_inv.dtype == torch.float32
    assert torch.equal(numbers_of(found), emulated(matrix, dtype))


@pytest.mark.parametrize("shape", [(33, 64, 48), (1, 16, 16), (7, 130, 5)])
@pytest.mark.parametrize("first", [E4M3, E5M2])
def test_product_is_that_of_the_rounded_matrices(first: torch.dtype, shape: tuple[int, int, int]) -> None:
    rows, inner, columns = shape
    a, b = normal(rows, inner), normal(columns, inner, seed=1)
    found = product(quantize(a, first), quantize(b, E4M3), torch.float32)
    theirs, other = emulated(a, first), emulated(b, E4M3)
    bound = SUM_BOUND * (theirs.abs() @ other.abs().t())
    assert ((found.double() - theirs @ other.t()).abs() <= bound).all()
    half = product(quantize(a, first), quantize(b, E4M3), torch.bfloat16)
    assert torch.equal(half, found.bfloat16())


def test_transposing_pads_what_is_summed_over() -> None:
    matrix = quantize(normal(21, 16), E5M2)
    turned = transposed(matrix)
    assert turned.values.shape == (16, 32) and turned.values.is_contiguous()
    assert torch.equal(numbers_of(turned)[:, :21], numbers_of(matrix).t())
    assert not numbers_of(turned)[:, 21:].any()
    weights = quantize(normal(21, 48), E4M3)
    found = product(turned, transposed(weights), torch.float32).double()
    bound = {"rtol": 1e-5, "atol": 1e-6 * found.abs().max().item()}
    torch.testing.assert_close(found, numbers_of(matrix).t() @ numbers_of(weights), **bound)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_scales_at_the_edges(dtype: torch.dtype) -> None:
    zeros = torch.zeros(16, 16, dtype=torch.bfloat16)
    found = quantize(zeros, dtype)
    assert found.scale_inv.isfinite().all() and not numbers_of(found).any()
    for number in (1.0, -3.0, 448.0, 1e-20, 2.0**100):
        same = torch.full((16, 16), number, dtype=torch.bfloat16)
        error = numbers_of(quantize(same, dtype)) / same.double() - 1
        assert error.abs().max() <= 2.0 ** -(1 + MANTISSA_BITS[dtype])
    for number in (1e-39, 3e-38):  # below what a scale of its own could lift into the range
        assert numbers_of(quantize(torch.full((16, 16), number), dtype)).abs().max() <= 1.25 * number


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_number_that_is_not_finite_is_not_hidden(dtype: torch.dtype, number: float) -> None:
    """8-bit casts saturate: without care an infinite gradient would become a large one."""
    matrix = normal(16, 32)
    matrix[3, 5] = number
    found = product(quantize(matrix, dtype), quantize(normal(16, 32), E4M3), torch.float32)
    assert found.isnan().all()
