"""The oracle itself: held against torch's own Adam and AdamW (closely), its rounding against known bits."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from adam_cases import RULE_NAMES, RULES, SPECIAL, scalars

from patch.optimizer.kernels.low_bit_moments import RngCoords, codes
from patch.optimizer.kernels.numpy_adam import (
    adam,
    join_split,
    low_bits,
    random_numbers,
    round_stochastically,
    round_to_bf16,
    sgd,
    to_eight_bits,
)


@pytest.mark.parametrize("rule", RULES, ids=RULE_NAMES)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_oracle_follows_torch_over_many_steps(weight_decay, rule):
    torch.manual_seed(0)
    reference = torch.nn.Parameter(torch.randn(1000, dtype=torch.float64))
    momentum = getattr(rule, "momentum", None)
    if momentum is None:
        kind = torch.optim.AdamW if rule.decoupled_weight_decay else torch.optim.Adam
        optimizer = kind([reference], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=weight_decay)
    else:
        optimizer = torch.optim.SGD([reference], lr=1e-2, momentum=momentum, weight_decay=weight_decay)
    num_moments = 2 if momentum is None else momentum > 0
    param, states = reference.detach().float().numpy(), [np.zeros(1000, np.float32)] * num_moments
    for step in range(1, 51):
        grad = torch.randn(1000)
        reference.grad = grad.double()
        optimizer.step()
        ours = replace(rule, lr=1e-2, grad_scale=0.5, weight_decay=weight_decay)
        if momentum is None:
            param, *states = adam(param, 2 * grad.numpy(), *states, replace(ours, step=step))
        else:
            param, *states = sgd(param, 2 * grad.numpy(), *states, scalars=ours)
    np.testing.assert_allclose(param, reference.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_weight_decay_of_zero_is_no_operation_at_all():
    """To the bit, so that a group without weight decay needs no code of its own."""
    master, *others = (np.random.default_rng(0).random(100, np.float32) for _ in range(4))
    for is_decoupled in (True, False):
        step = scalars(decoupled_weight_decay=is_decoupled, weight_decay=0.0, grad_scale=1.0)
        grad, exp_avg, exp_avg_sq = others
        m = exp_avg * np.float32(0.9) + grad * np.float32(1 - 0.9)
        v = exp_avg_sq * np.float32(0.95) + (grad * np.float32(1 - 0.95)) * grad
        root_bias2 = np.float32(np.sqrt(1 - 0.95**3))
        p = master - np.float32(3e-4 / (1 - 0.9**3)) * (m / (np.sqrt(v) / root_bias2 + np.float32(1e-8)))
        assert all(map(np.array_equal, adam(master, *others, step), (p, m, v)))


def test_bf16_rounding_is_to_nearest_with_halves_away_from_zero_and_keeps_nan():
    bits = np.array([0x3F808000, 0x3F818000, 0x3F807FFF, 0xBF808000, 0x00008000, 0x7F800000], np.uint32)
    expected = np.array([0x3F81, 0x3F82, 0x3F80, 0xBF81, 0x0001, 0x7F80], np.uint16)
    assert np.array_equal(round_to_bf16(bits.view(np.float32)), expected)
    masters = np.append(np.random.default_rng(0).normal(0, 100, 10_000), np.nan).astype(np.float32)
    ours = torch.from_numpy(round_to_bf16(masters).view(np.int16)).view(torch.bfloat16)
    assert ours[-1].isnan()
    masters = torch.from_numpy(masters)
    distances = [(rounded.float() - masters)[:-1].abs() for rounded in (ours, masters.bfloat16())]
    assert (distances[0] <= distances[1]).all()


def test_split_masters_join_to_the_bit():
    high = np.arange(1 << 16, dtype=np.uint32)[:, None] << np.uint32(16)
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    masters = np.append((high | low).view(np.float32).ravel(), SPECIAL)
    joined = join_split(round_to_bf16(masters), low_bits(masters))
    is_nan = np.isnan(masters)
    assert np.isnan(joined[is_nan]).all()
    assert np.array_equal(joined[~is_nan].view(np.uint32), masters[~is_nan].view(np.uint32))


def test_folded_scalars_are_the_same_update():
    master, *others = (np.random.default_rng(0).random(100, np.float32) for _ in range(4))
    plain, folded = (adam(master, *others, scalars(step=2), is_folded=folded) for folded in (False, True))
    np.testing.assert_allclose(folded[0], plain[0], rtol=1e-6)
    assert all(map(np.array_equal, folded[1:], plain[1:]))


def _drawn(step: int, name: str = "weight", first: int = 0) -> np.ndarray:
    *_, first_key, second_key = RngCoords(name, 0, 1, 1).numbers(step)
    return random_numbers(np.arange(first, first + 100_000, dtype=np.uint64), first_key, second_key)


def test_stochastic_rounding_keeps_the_mean_and_is_one_of_two_neighbours():
    numbers = _drawn(1)
    for value in (1.0, 1.001, -1.003, 3e-41, 0.0, 1.7e38, np.inf):
        values = np.full(len(numbers), value, np.float32)
        for half in (numbers & np.uint32(0xFFFF), numbers >> np.uint32(16)):
            bits = round_stochastically(values, half).astype(np.uint32) << np.uint32(16)
            found = np.unique(bits.view(np.float32))
            assert len(found) <= 2 and found[0] <= values[0] <= found[-1]
            if np.isfinite(value):
                mean = bits.view(np.float32).astype(np.float64).mean()
                gap = float(found[-1]) - float(found[0])
                assert abs(mean - float(values[0])) <= 5 * 0.5 * gap / np.sqrt(len(numbers))
    assert (round_stochastically(np.full(9, np.nan, np.float32), numbers[:9] >> 16) == 0x7FC0).all()


def test_random_numbers_of_moments_steps_names_and_elements_do_not_go_together():
    here = _drawn(1)
    others = [_drawn(2), _drawn(1, "bias"), _drawn(1, first=1), _drawn(1, first=2**32), here >> np.uint32(16)]
    low = (here & np.uint32(0xFFFF)).astype(np.float64)
    for other in others:
        other_low = (other & np.uint32(0xFFFF)).astype(np.float64)
        assert abs(np.corrcoef(low, other_low)[0, 1]) < 5 / np.sqrt(len(low))
    counts = np.bincount(here >> np.uint32(24), minlength=256)
    assert np.square(counts - counts.mean()).sum() / counts.mean() < 256 + 5 * np.sqrt(512)


@pytest.mark.parametrize("signed", [True, False], ids=["exp_avg", "exp_avg_sq"])
def test_eight_bits_are_those_of_bitsandbytes(signed):
    functional = pytest.importorskip("bitsandbytes", reason="make test installs it").functional
    theirs = functional.create_dynamic_map(signed)
    ours = codes(signed=signed)
    np.testing.assert_allclose(ours[1:], theirs[1:], rtol=2e-7)  # the last bit of torch.linspace
    assert ours[0] == (-1.0 if signed else 0.0)
    generator = np.random.default_rng(0)
    values = generator.normal(size=(1000, 64)) * 10.0 ** generator.uniform(-4, 0, (1000, 64))
    values = (values if signed else np.square(values)).astype(np.float32).ravel()
    indices, scales = to_eight_bits(values, signed=signed)
    code = torch.from_numpy(ours.copy())
    # Its kernel for CPUs looks up a coarse table; the one for any device takes the nearest code, as on GPUs.
    any_device = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
    quantize = torch.ops.bitsandbytes.quantize_blockwise.default
    expected, absmax = quantize.redispatch(any_device, torch.from_numpy(values), code, 64)
    np.testing.assert_array_equal(scales, absmax.numpy())
    np.testing.assert_array_equal(indices, np.maximum(expected.numpy(), 0 if signed else 1))
    of_indices = {"absmax": absmax, "code": code, "blocksize": 64}
    restored = functional.dequantize_blockwise(torch.from_numpy(indices), **of_indices)
    values = ours[indices] * np.repeat(scales, 64)
    np.testing.assert_array_equal(values, restored.numpy())
    again = to_eight_bits(values, signed=signed)
    assert np.array_equal(again[0], indices) and np.array_equal(again[1], scales), "rounding what was rounded"


def test_a_second_moment_never_has_the_code_of_zero_and_a_denormal_block_is_zero():
    values = np.full(128, 1e-12, np.float32)
    values[0], values[1], values[64:] = 1.0, 0.0, 1e-39
    indices, scales = to_eight_bits(values, signed=False)
    assert indices[:3].tolist() == [255, 1, 1] and scales.tolist() == [1.0, 0.0]
