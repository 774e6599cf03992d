"""The Triton kernel on a GPU against the NumPy oracle on the CPU, to the bit."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from adam_cases import (
    BLOCKS,
    FORMS,
    MOMENTS,
    RULE_NAMES,
    RULES,
    SIZES,
    assert_equal,
    bits_after,
    make_items,
    scalars,
)
from gpu.runs import gigabytes_a_second

from patch.optimizer.kernels import adam_kernel
from patch.optimizer.kernels.numpy_adam import NumpyAdam
from patch.optimizer.kernels.spec import AdamScalars, AdamStates, UpdateItem

TAIL = 4099


@pytest.mark.parametrize("sizes", [SIZES, (1 << 16,)], ids=["odd", "aligned"])
@pytest.mark.parametrize("rule", RULES, ids=RULE_NAMES)
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_triton_equals_the_oracle(form, grad_dtype, rule, sizes):
    for seed, scale in enumerate((1e-30, 1e-3, 1e12)):
        step = replace(rule, step=10**seed) if isinstance(rule, AdamScalars) else rule
        changes = {"seed": seed, "scale": scale, "sizes": sizes, "has_out": seed == 1}
        ours = make_items(form, grad_dtype, step, device="cuda", **changes)
        expected = make_items(form, grad_dtype, step, **changes)
        kernel = adam_kernel(torch.device("cuda"))
        assert_equal(bits_after(kernel, ours), bits_after(NumpyAdam(), expected))


@pytest.mark.parametrize("moments", MOMENTS, ids="-".join)
def test_moments_in_fewer_bytes_equal_the_oracle(moments):
    sizes = (*(BLOCKS if "8bit" in moments else SIZES), 1 << 16)
    for form, (seed, scale) in product(("fp32 weight", "split master"), enumerate((1e-30, 1e-3, 1.0))):
        make = partial(make_items, form, torch.float32, has_out=True, sizes=sizes, moments=moments)
        ours, expected = make(seed=seed, scale=scale, device="cuda"), make(seed=seed, scale=scale)
        kernel = adam_kernel(torch.device("cuda"))
        assert_equal(bits_after(kernel, ours), bits_after(NumpyAdam(), expected))


@pytest.mark.parametrize("kind", ["fp32", "bf16", "8bit"])
def test_the_speed_of_an_update(figure, kind):
    items = make_items("split master", torch.bfloat16, sizes=(1 << 26,), moments=(kind, kind), device="cuda")
    kernel, (item,) = adam_kernel(torch.device("cuda")), items
    size = 2 * sum(t.nbytes for t in item.states if t is not None) + item.grad.nbytes
    figure(f"update, {kind} moments", gigabytes_a_second(lambda: kernel.update(items), size))


def test_elements_beyond_two_to_the_31_are_updated():
    numel = (1 << 31) + TAIL
    if torch.cuda.mem_get_info()[0] < 17 * numel:
        pytest.skip(f"needs {17 * numel / 1e9:.0f} GB of GPU memory")
    values = [torch.full((numel,), value, device="cuda") for value in (1e-3, 0.02, 1e-4, 1e-6)]
    for tensor in values:
        tensor[-TAIL:].mul_(torch.linspace(0.5, 2.0, TAIL, device="cuda"))
    grad, *states = (tensor[-TAIL:].cpu() for tensor in values)
    kernel = adam_kernel(torch.device("cuda"))
    kernel.update([UpdateItem(values[0], AdamStates(*values[1:]), scalars())])
    NumpyAdam().update([UpdateItem(grad, AdamStates(*states), scalars())])
    for ours, expected in zip(values[1:], states, strict=True):
        assert torch.equal(ours[-TAIL:].cpu(), expected)
        assert ours[: 1 << 31].max() == ours[: 1 << 31].min() == ours[0]


def test_an_update_waits_for_nothing():
    items = make_items("split master", torch.bfloat16, device="cuda")
    kernel = adam_kernel(torch.device("cuda"))
    kernel.update(items)  # compiles
    torch.cuda.synchronize()
    torch.cuda._sleep(2 * 10**9)  # cycles: about a second
    kernel.update(items)
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
