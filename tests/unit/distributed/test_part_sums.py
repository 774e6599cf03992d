"""Triton's sum of ranks' parts against torch's additions in the order of ranks, and what a GPU would run."""

import functools
import re

import pytest
import torch
from triton_interpreter import interpreted, output_of_compiler, rounding

pytest.importorskip("triton.language", reason="Triton is not installed: pip install triton")

MODULE, DTYPES = "patch.distributed.part_sums", [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def kernels():
    with interpreted(MODULE, rounding) as module:
        yield module


def parts_of(ranks: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Of sizes so different that another order, or another rounding, gives other bits; the first is -0."""
    generator = torch.Generator().manual_seed(ranks)
    sizes = torch.exp2(torch.randint(-8, 9, (ranks, numel), generator=generator).float())
    parts = torch.randn(ranks, numel, generator=generator) * sizes
    parts[:, 0] = -0.0
    return parts.to(dtype)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("ranks", "numel"), [(1, 5), (2, 512), (8, 513), (19, 1030)])
def test_parts_are_added_up_in_fp32_and_rounded_once(kernels, ranks, numel, out_dtype) -> None:
    parts = parts_of(ranks, numel, torch.bfloat16)
    out = torch.full((numel,), torch.nan, dtype=out_dtype)
    expected = functools.reduce(torch.add, parts.float())
    kernels.add_parts(parts, out)
    assert torch.equal(out.view(torch.uint8), expected.to(out_dtype).view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 8, 17])
def test_with_an_own_part_each_addition_is_rounded_as_torch_does(kernels, ranks, dtype) -> None:
    parts = parts_of(ranks, 515, dtype)
    expected = functools.reduce(torch.add, parts)
    for rank in {0, 1, ranks - 1}:
        received, out = torch.cat((parts[:rank], parts[rank + 1 :])), torch.empty_like(expected)
        kernels.add_parts(received, out, own=parts[rank], rank=rank)
        assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8)), rank


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from patch.distributed.part_sums import _add_parts

for out, has_own in (("*fp32", False), ("*bf16", True)):
    kinds = {"received": "*bf16", "own": "*bf16", "out": out, "has_own": "constexpr"}
    kinds = {name: kinds.get(name, "i32") for name in _add_parts.arg_names}
    attrs = {(i,): [["tt.divisibility", 16]] for i in (0, 1, 2, 5)}
    source = ASTSource(fn=_add_parts, signature=kinds, constexprs={"has_own": has_own}, attrs=attrs)
    print(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])
"""


def test_compiled_for_a_gpu_eight_wide_loads_are_under_way_and_nothing_is_fused() -> None:
    ptx = output_of_compiler(COMPILE)
    assert not re.findall(r"fma|ftz", ptx)
    assert len(re.findall(r"ld\.global\.v2\.b32", ptx)) >= 8 and "st.global.v4" in ptx
