"""Triton's kernels for 8-bit factors: its interpreter against the plain form to the bit, and PTX for a GPU.

Triton's interpreter rounds ties of 8-bit casts away from zero, and some numbers to half of theirs. So it gets
torch's cast here; on a GPU the instruction rounds, and the PTX says how.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from triton_interpreter import interpreted, output_of_compiler

from patch.amax import note_amax
from patch.model.fp8 import matrix as fp8_matrix

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

MODULE = "patch.model.fp8.kernels"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BITS_OF_512 = 0x44000000
SHAPES = [(21, 48), (67, 144)]
WAYS = [(True, True), (True, False), (False, True)]


def casting(convert):
    """The interpreter's conversion of floats, with torch's cast for 8-bit targets."""
    kinds = {"fp8e4nv": E4M3, "fp8e5": E5M2}

    def converted(values, source, target, rounding):
        if str(target) not in kinds:
            return convert(values, source, target, rounding)
        assert str(source) == "fp32"
        return torch.from_numpy(values.copy()).to(kinds[str(target)]).view(torch.uint8).numpy()

    return converted


@pytest.fixture(scope="module")
def kernels():
    with interpreted(MODULE, casting) as module:
        yield module


def numbers(rows: int, columns: int, source: torch.dtype) -> torch.Tensor:
    """Rows and columns of very different size: some round to subnormal numbers and to zero."""
    generator = torch.Generator().manual_seed(rows)
    sizes = torch.randn(rows, 1, generator=generator) + torch.randn(1, columns, generator=generator)
    return (torch.randn(rows, columns, generator=generator) * torch.exp2(3 * sizes)).to(source)


def assert_same(ours, theirs) -> None:
    """Of two Fp8Matrix: every bit; or neither."""
    assert (ours is None) == (theirs is None)
    if ours is not None:
        assert ours.values.dtype == theirs.values.dtype and ours.values.is_contiguous()
        assert torch.equal(ours.values.view(torch.uint8), theirs.values.view(torch.uint8))
        assert torch.equal(ours.scale_inv, theirs.scale_inv)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16], ids=str)
def test_factors_are_those_of_the_plain_form(kernels, source, dtype) -> None:
    for shape in SHAPES:
        matrix = numbers(*shape, source)
        for x in (matrix, matrix.t().contiguous().t()):
            for rows, columns in WAYS:
                asked = {"rows": rows, "columns": columns}
                expected = fp8_matrix.quantize_operands(x, dtype, **asked)
                known = next(each.scale_inv for each in expected if each)
                for scale_inv in (None, known):
                    found = kernels.quantize_operands(x, dtype, **asked, scale_inv=scale_inv)
                    for ours, theirs in zip(found, expected, strict=True):
                        assert_same(ours, theirs)


def rows_by(kernels) -> Callable[..., Any]:
    return lambda *matrix, **asked: kernels.quantize_operands(*matrix, **asked, columns=False).rows


def test_single_matrices_edges_and_turning(kernels) -> None:
    edges = torch.zeros(32, 16)
    edges[1], edges[2], edges[3], edges[4, 3] = 2.0**100, 1e-39, 448.0, -3e38
    for matrix in (numbers(37, 53, torch.float32), edges, torch.zeros(16, 16), torch.zeros(0, 16)):
        expected = fp8_matrix.quantize(matrix, E4M3)
        assert_same(rows_by(kernels)(matrix, E4M3), expected)
        for form in (rows_by(kernels), fp8_matrix.quantize):
            raised = form(matrix, E4M3, agree=lambda bits: bits.fill_(BITS_OF_512))
            assert raised.scale_inv == 2
        turned = fp8_matrix.transposed(expected).values
        assert torch.equal(kernels.transposed(expected.values).view(torch.uint8), turned.view(torch.uint8))


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_makes_its_scale_nan(kernels, number: float) -> None:
    matrix = numbers(67, 144, torch.bfloat16)
    matrix[3, 140] = number
    for form in (rows_by(kernels), fp8_matrix.quantize):
        assert form(matrix, E5M2).scale_inv.isnan()


def test_a_noted_number_is_taken_for_the_numbers_that_it_belongs_to_alone(kernels) -> None:
    for form in (rows_by(kernels), fp8_matrix.quantize):
        whole = numbers(4, 96, torch.bfloat16)
        searched = form(whole.clone(), E4M3).scale_inv
        note_amax(whole, whole.abs().max().float() * 2)  # not true, so that it is seen
        for same in (whole, whole.view(2, 2, 96).detach().reshape(-1, 48)):
            assert torch.equal(form(same, E4M3).scale_inv, 2 * searched)
        repeated, others = whole.as_strided((4, 96), (0, 1)), [whole[1:], whole.t(), whole.view(torch.half)]
        for other in (whole.clone(), repeated, *others):
            assert torch.equal(form(other, E4M3).scale_inv, form(other.clone(), E4M3).scale_inv)
        whole[2].mul_(1)
        assert torch.equal(form(whole, E4M3).scale_inv, searched)


COMPILE = """
import torch, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from patch.model.fp8 import kernels as k

def ptx(kernel, kinds, constants):
    names = kernel.arg_names
    signature = {name: kinds.get(name, "i32") for name in names} | {name: "constexpr" for name in constants}
    numbers = [i for i, name in enumerate(names) if name not in constants and name != "largest"]
    attrs = {(i,): [["tt.divisibility", 16]] for i in numbers}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]

tile = {"tile_rows": 64, "tile_columns": 128}
print(ptx(k._amax_tile, {"x": "*bf16", "target": "*i32"}, {"column_stride": 1} | tile))
for dtype, pointer in ((tl.float8e5, "*fp8e5"), (tl.float8e4nv, "*fp8e4nv")):
    cast = {"x": "*bf16", "straight": pointer, "across": pointer, "bits": "*i32", "scale_inv": "*fp32",
            "largest": "fp32"}
    constants = {"has_rows": True, "has_columns": True, "is_known": False, "dtype": dtype}
    constants |= {"column_stride": 1} | tile
    print(ptx(k._cast_tile, cast, constants))
print(ptx(k._turn, {"x": "*u8", "across": "*u8"}, {"column_stride": 1} | tile))
"""


def test_compiled_for_a_gpu_casts_round_to_even_and_nothing_is_flushed() -> None:
    ptx = output_of_compiler(COMPILE)
    assert not re.findall(r"ftz|approx|div\.full", ptx)
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx and "cvt.rn.satfinite.e5m2x2.f32" in ptx
    assert "div.rn.f32" in ptx and "ld.global.v4" in ptx, "wide loads"
