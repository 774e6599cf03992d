"""The oracle itself: held against torch's own Adam and AdamW (closely), its rounding against known bits."""

import numpy as np
import pytest
import torch
from adam_cases import SPECIAL, scalars

from patch.optimizer.kernels.numpy_adam import adam, join_split, low_bits, round_to_bf16


@pytest.mark.parametrize("is_decoupled", [True, False], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_oracle_follows_torch_over_many_steps(weight_decay, is_decoupled):
    torch.manual_seed(0)
    reference = torch.nn.Parameter(torch.randn(1000, dtype=torch.float64))
    kind = torch.optim.AdamW if is_decoupled else torch.optim.Adam
    optimizer = kind([reference], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=weight_decay)
    param, states = reference.detach().float().numpy(), [np.zeros(1000, np.float32)] * 2
    for step in range(1, 51):
        grad = torch.randn(1000)
        reference.grad = grad.double()
        optimizer.step()
        ours = scalars(
            lr=1e-2, weight_decay=weight_decay, step=step, grad_scale=0.5, decoupled_weight_decay=is_decoupled
        )
        param, *states = adam(param, 2 * grad.numpy(), *states, ours)
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


def test_bf16_rounding_is_to_nearest_with_halves_away_from_zero():
    bits = np.array([0x3F808000, 0x3F818000, 0x3F807FFF, 0xBF808000, 0x00008000, 0x7F800000], np.uint32)
    expected = np.array([0x3F81, 0x3F82, 0x3F80, 0xBF81, 0x0001, 0x7F80], np.uint16)
    assert np.array_equal(round_to_bf16(bits.view(np.float32)), expected)


def test_bf16_rounding_keeps_nan_and_is_never_further_than_torch():
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
