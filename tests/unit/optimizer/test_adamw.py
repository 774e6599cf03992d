"""The AdamW update against its NumPy oracle (to the bit) and against torch's own AdamW (closely)."""

import numpy as np
import pytest
import torch

from patch.optimizer.adamw import AdamWScalars, adamw_update, adamw_update_numpy
from patch.optimizer.rounding import round_to_bf16

SPECIAL = [
    0.0,
    -0.0,
    1e-45,
    -1e-40,
    1e-38,
    3e38,
    -3e38,
    1e19,
    -1e-19,
    1.0,
    float(np.nextafter(np.float32(1), 2)),
]


def _arrays(seed: int, scale: float) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    arrays = [generator.normal(0, scale, 4099).astype(np.float32) for _ in range(4)]
    for array in arrays:
        array[: len(SPECIAL)] = generator.permutation(SPECIAL)
    arrays[3] = np.abs(arrays[3])
    return arrays


@pytest.mark.parametrize("step", [1, 2, 1000])
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e12])
def test_update_equals_numpy_oracle_to_the_bit(scale: float, step: int) -> None:
    scalars = AdamWScalars(
        lr=3e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=step, grad_scale=0.37
    )
    ours = [torch.from_numpy(array) for array in _arrays(step, scale)]
    oracle = _arrays(step, scale)
    with np.errstate(all="ignore"):
        adamw_update(*ours, scalars)
        adamw_update_numpy(*oracle, scalars)
    for index, name in ((0, "param"), (2, "exp_avg"), (3, "exp_avg_sq")):
        mine, expected = ours[index], oracle[index]
        assert np.array_equal(mine.numpy().view(np.int32), expected.view(np.int32)), name


def test_update_follows_torch_adamw_over_many_steps() -> None:
    torch.manual_seed(0)
    reference = torch.nn.Parameter(torch.randn(1000, dtype=torch.float64))
    optimizer = torch.optim.AdamW([reference], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    param, exp_avg, exp_avg_sq = reference.detach().float(), torch.zeros(1000), torch.zeros(1000)
    for step in range(1, 51):
        grad = torch.randn(1000)
        reference.grad = grad.double()
        optimizer.step()
        scalars = AdamWScalars(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=step)
        adamw_update(param, grad.clone(), exp_avg, exp_avg_sq, scalars)
    torch.testing.assert_close(param.double(), reference.detach(), rtol=1e-5, atol=1e-6)


def test_bf16_rounding_is_to_nearest_with_halves_away_from_zero() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F807FFF, 0xBF808000, 0x00008000, 0x7F800000], dtype=np.uint32)
    expected = np.array([0x3F81, 0x3F82, 0x3F80, 0xBF81, 0x0001, 0x7F80], dtype=np.uint16)
    weights = torch.zeros(len(bits), dtype=torch.bfloat16)
    round_to_bf16(torch.from_numpy(bits.view(np.float32)), weights)
    assert np.array_equal(weights.view(torch.int16).numpy().view(np.uint16), expected)


def test_bf16_rounding_keeps_nan_and_is_never_further_than_torch() -> None:
    masters = torch.cat([torch.randn(10_000) * 100, torch.tensor([float("nan")])])
    weights = torch.zeros(len(masters), dtype=torch.bfloat16)
    round_to_bf16(masters, weights)
    assert weights[-1].isnan()
    ours = (weights[:-1].float() - masters[:-1]).abs()
    assert (ours <= (masters[:-1].bfloat16().float() - masters[:-1]).abs()).all()
