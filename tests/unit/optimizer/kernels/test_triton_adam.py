"""The Triton kernel: its interpreter against the NumPy oracle to the bit, and what a GPU would get to run."""

import re
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from adam_cases import BLOCKS, FORMS, MOMENTS, RULE_NAMES, RULES, SIZES, assert_equal, bits_after, make_items
from triton_interpreter import interpreted, output_of_compiler

from patch.optimizer.kernels.numpy_adam import NumpyAdam
from patch.optimizer.kernels.spec import AdamScalars

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

MODULE = "patch.optimizer.kernels.triton_adam"


@pytest.fixture(scope="module")
def kernel():
    with interpreted(MODULE) as module:
        yield module.TritonAdam()


@pytest.mark.parametrize("rule", RULES, ids=RULE_NAMES)
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_interpreter_equals_the_oracle(kernel, form, grad_dtype, rule):
    for seed, scale in enumerate((1e-30, 1e-3, 1e12)):
        step = replace(rule, step=10**seed) if isinstance(rule, AdamScalars) else rule
        ours, expected = (make_items(form, grad_dtype, step, seed=seed, scale=scale) for _ in range(2))
        assert_equal(bits_after(kernel, ours), bits_after(NumpyAdam(), expected))


@pytest.mark.parametrize("moments", MOMENTS, ids="-".join)
def test_moments_in_fewer_bytes_equal_the_oracle(kernel, moments):
    sizes = BLOCKS if "8bit" in moments else SIZES
    for form, (seed, scale) in product(("fp32 weight", "split master"), enumerate((1e-30, 1e-3, 1.0))):
        make = partial(make_items, form, torch.float32, has_out=True, sizes=sizes, moments=moments)
        ours, expected = (make(seed=seed, scale=scale) for _ in range(2))
        assert_equal(bits_after(kernel, ours), bits_after(NumpyAdam(), expected))


def test_one_call_takes_items_of_all_forms_with_out(kernel):
    ours, expected = (
        [s for form in FORMS for s in make_items(form, torch.bfloat16, has_out=True)] for _ in range(2)
    )
    assert_equal(bits_after(kernel, ours), bits_after(NumpyAdam(), expected))


@pytest.mark.parametrize("moments", [("fp32", "fp32"), ("bf16", "8bit")], ids="-".join)
def test_a_prepared_update_takes_new_scalars_in_each_step(kernel, moments):
    ours, expected = (
        make_items("split master", torch.float32, has_out=False, sizes=BLOCKS, moments=moments)
        for _ in range(2)
    )
    groups = [index % 2 for index in range(len(ours))]
    both = [each.prepare(items, groups) for each, items in ((kernel, ours), (NumpyAdam(), expected))]
    for step in (1, 2, 3):
        scalars = [replace(RULES[0], step=step, lr=rate) for rate in (0.01 * step, 0.001)]
        found = []
        for update, items in zip(both, (ours, expected), strict=True):
            prepared = SimpleNamespace(update=lambda _, update=update, now=scalars: update(now))
            found.append(bits_after(prepared, items))
        assert_equal(*found)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from patch.optimizer.kernels.triton_adam import _update

names = _update.arg_names
kinds = {"table": "*i64", "codes": "*fp32", "buckets": "*i32", "num_items": "i32"}
constants = dict(zip(names[4:], (True, True, False, True, *MOMENTS, 16)))
signature = {name: kinds.get(name, "constexpr") for name in names}
source = ASTSource(fn=_update, signature=signature, constexprs=constants)
options = {"enable_fp_fusion": False}
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
"""


@pytest.mark.parametrize("kinds", [(0, 0), (1, 1), (2, 2), (0, -1)], ids=["fp32", "bf16", "8bit", "SGD"])
def test_compiled_for_a_gpu_nothing_is_fused_flushed_or_approximated(kinds):
    ptx = output_of_compiler(COMPILE.replace("MOMENTS", str(kinds)))
    assert not re.findall(r"fma|ftz|approx|div\.full", ptx)
    assert kinds[1] < 0 or "div.rn.f32" in ptx and "sqrt.rn.f32" in ptx
    assert "ld.global.v4" in ptx, "wide loads"
