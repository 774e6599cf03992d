"""The C++ kernel against its NumPy oracle, to the bit: values, forms, instruction sets, threads, forks."""

import math
import os
import signal
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from adam_cases import BLOCKS, FORMS, MOMENTS, RULES, SIZES, assert_equal, bits_after, make_items, scalars

from patch.optimizer.kernels.cpp_adam import INSTRUCTION_SETS, CppAdam, load, num_threads
from patch.optimizer.kernels.numpy_adam import NumpyAdam
from patch.optimizer.kernels.spec import AdamScalars, AdamStates, UpdateItem

GRADIENTS = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def kernel(request):
    if INSTRUCTION_SETS.index(request.param) > load().adam_best_instruction_set():
        pytest.skip(f"this CPU has no {request.param}")
    return CppAdam(1, request.param)


@pytest.mark.parametrize("grad_dtype", GRADIENTS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_instruction_set_equals_the_oracle(kernel, form, grad_dtype):
    for rule, has_out in product(RULES, (False, True)):
        for seed, scale in enumerate((1e-30, 1e-3, 1.0, 1e12)):
            step = replace(rule, step=10**seed) if isinstance(rule, AdamScalars) else rule
            make = partial(make_items, form, grad_dtype, step, seed=seed, scale=scale, has_out=has_out)
            assert_equal(bits_after(kernel, make()), bits_after(NumpyAdam(), make()))


@pytest.mark.parametrize("moments", MOMENTS, ids="-".join)
@pytest.mark.long
def test_moments_in_fewer_bytes_equal_the_oracle(kernel, moments):
    sizes = BLOCKS if "8bit" in moments else (*SIZES, 70_001)
    for form, (seed, scale), has_out in product(FORMS, enumerate((1e-30, 1e-3, 1.0)), (False, True)):
        make = partial(make_items, form, torch.float32, sizes=sizes, moments=moments)
        ours, expected = (make(seed=seed, scale=scale, has_out=has_out) for _ in range(2))
        assert_equal(bits_after(kernel, ours), bits_after(NumpyAdam(), expected))


@pytest.mark.parametrize("sizes", [SIZES, (70_001,)], ids=["odd", "aligned"])
@pytest.mark.parametrize("form", FORMS)
def test_results_go_to_out_and_states_stay(form, sizes):
    ours, expected = (make_items(form, torch.bfloat16, has_out=True, sizes=sizes) for _ in range(2))
    before = [item.states.exp_avg.clone() for item in ours]
    assert_equal(bits_after(CppAdam(), ours), bits_after(NumpyAdam(), expected))
    in_place = make_items(form, torch.bfloat16, sizes=sizes)
    CppAdam().update(in_place)
    for item, same, exp_avg in zip(ours, in_place, before, strict=True):
        assert torch.equal(item.states.exp_avg.view(torch.int32), exp_avg.view(torch.int32))
        for result, state in zip(item.out, same.states, strict=True):
            assert result is None or torch.equal(result.nan_to_num(), state.nan_to_num())


def test_ties_between_two_bf16_survive_a_step_of_length_zero():
    step = scalars(lr=0.0)
    ours, expected = (make_items("split master", torch.float32, step) for _ in range(2))
    bits = bits_after(CppAdam(), ours)
    assert_equal(bits, bits_after(NumpyAdam(), expected))
    assert (bits[-4] == -0x8000).sum() > 100, "halves between two bf16"


def _large(numel: int = 300_001, step: int = 3) -> UpdateItem:
    torch.manual_seed(0)
    states = AdamStates(torch.randn(numel), torch.randn(numel), torch.rand(numel))
    return UpdateItem(torch.randn(numel), states, scalars(step=step))


def test_threads_and_empty_items_change_no_bit():
    found = [bits_after(CppAdam(threads), [_large(), _large(9), _large(0)]) for threads in (1, 2, 7)]
    assert_equal(found[0], found[1])
    assert_equal(found[0], found[2])
    CppAdam().update([])


@pytest.mark.parametrize("grad_dtype", GRADIENTS, ids=str)
@pytest.mark.parametrize("scale", (1e-30, 1.0, 1e30))  # squares that float32 does not hold
def test_sums_of_squares_are_exact_but_for_float64_and_the_same_everywhere(grad_dtype, scale):
    values = (_large().grad * scale).to(grad_dtype)
    parts = values.split([1, 31, 65_536, 100_000, 134_433, 0])
    best = load().adam_best_instruction_set()
    kernels = [CppAdam(threads, name) for threads in (1, 2, 7) for name in INSTRUCTION_SETS[: best + 1]]
    found = [kernel.sums_of_squares(parts).tolist() for kernel in kernels]
    assert all(sums == found[0] for sums in found)
    exact = [math.fsum(value * value for value in part.double().tolist()) for part in parts]
    assert found[0] == pytest.approx(exact, rel=1e-13, abs=0)
    values[70_000] = math.inf
    assert CppAdam().sums_of_squares(parts).isinf().tolist() == [False, False, False, True, False, False]


def test_a_forked_child_updates_too():
    kernel, item = CppAdam(2), _large()
    expected = bits_after(kernel, [_large()])
    for tensor in item.states[:3]:
        tensor.share_memory_()
    child = os.fork()
    if not child:
        signal.alarm(60)
        kernel.update([item])  # and nothing else: torch's own threads do not survive a fork
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    tensors = (item.grad, *item.states[:3])
    assert_equal([tensor.view(torch.int32).numpy() for tensor in tensors], expected)


def test_a_thread_that_flushes_denormals_gets_the_same_bits():
    items = [make_items("fp32 weight", torch.float32, scale=1e-39) for _ in range(2)]
    torch.set_flush_denormal(True)
    try:
        ours = bits_after(CppAdam(1), items[0])
        assert torch.tensor([1e-39]).mul(1.0) == 0, "flushing is off: nothing was shown"
    finally:
        torch.set_flush_denormal(False)
    assert_equal(ours, bits_after(NumpyAdam(), items[1]))


WRONG = {
    "strided": {"grad": torch.zeros(16)[::2]},
    "short": {"grad": torch.zeros(7)},
    "half moments": {"exp_avg": torch.zeros(8).half()},
    "split without weight": {"master": torch.zeros(8, dtype=torch.int16)},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_what_no_pointer_may_point_at_is_refused(wrong):
    item = _large(8)
    item = item._replace(**wrong) if "grad" in wrong else item._replace(states=item.states._replace(**wrong))
    with pytest.raises(AssertionError):
        CppAdam().update([item])


def test_beside_a_gpu_a_core_is_left_to_the_thread_that_launches_kernels(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(4)))
    try:
        for threads, alone, beside in ((8, 4, 3), (3, 3, 2), (1, 1, 1)):
            torch.set_num_threads(threads)
            assert (num_threads(beside_gpu=False), num_threads(beside_gpu=True)) == (alone, beside)
    finally:
        torch.set_num_threads(before)
