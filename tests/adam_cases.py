"""Segments for the Adam kernels: every form of states, filled with values that rounding may stumble over."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from patch.optimizer.kernels import AdamKernel, AdamScalars, Segment, States
from patch.optimizer.kernels.numpy_adam import low_bits, round_to_bf16

FORMS = ("fp32 weight", "bf16 weight", "fp16 weight", "split master")
SPECIAL = np.array(
    [0.0, -0.0, 1e-45, -1e-40, 1e-38, 3e38, -3e38, 1e19, -1e-19, 1.0, np.inf, -np.inf, np.nan], np.float32
)
SIZES = (1, 2, 3, 31, 4099)


def scalars(**changes: Any) -> AdamScalars:
    """Those of a usual step, or changed."""
    usual = {"lr": 3e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 3}
    return AdamScalars(**usual | {"grad_scale": 0.37} | changes)


def make_segments(
    form: str, grad_dtype: torch.dtype, *, seed: int = 0, scale: float = 1.0, is_shadowed: bool = False
) -> list[Segment]:
    """Segments of SIZES, decayed or not, at aligned and unaligned addresses; the same for the same seed."""
    generator = np.random.default_rng(seed)
    return [
        _segment(generator, form, grad_dtype, scale, numel, index, is_shadowed)
        for index, numel in enumerate(SIZES)
    ]


def _segment(
    generator: np.random.Generator, form: str, grad_dtype: torch.dtype, scale: float, numel: int, *rest: int
) -> Segment:
    index, is_shadowed = rest
    master, grad, exp_avg, exp_avg_sq = (_values(generator, scale, numel) for _ in range(4))
    states = _states(form, master, exp_avg, np.abs(exp_avg_sq), index)
    shadow = _states(form, *(np.full(numel, 7, np.float32) for _ in range(3)), index)
    gradient = _at(index, torch.from_numpy(grad).to(grad_dtype))
    return Segment(gradient, states, index % 2 == 0, shadow if is_shadowed else None)


def _values(generator: np.random.Generator, scale: float, numel: int) -> np.ndarray:
    """Normal numbers, a tenth of them replaced by special ones, another by halves between two bf16."""
    values = (generator.normal(0, 1, numel) * scale).astype(np.float32)
    kind = generator.integers(0, 10, numel)
    values = np.where(kind == 0, generator.choice(SPECIAL, numel), values)
    halves = (values.view(np.uint32) & np.uint32(0xFFFF0000) | np.uint32(0x8000)).view(np.float32)
    return np.where(kind == 1, halves, values)


def _states(form: str, master: np.ndarray, exp_avg: np.ndarray, exp_avg_sq: np.ndarray, index: int) -> States:
    weight = {
        "fp32 weight": None,
        "fp16 weight": torch.zeros(len(master), dtype=torch.float16),
    }.get(form, torch.from_numpy(round_to_bf16(master).view(np.int16)).view(torch.bfloat16))
    if form == "split master":
        master = low_bits(master).view(np.int16)
    tensors = [_at(index, torch.from_numpy(array)) for array in (master, exp_avg, exp_avg_sq)]
    return States(*tensors, weight if weight is None else _at(index, weight))


def _at(index: int, tensor: torch.Tensor) -> torch.Tensor:
    """A copy that starts `index` elements into its memory."""
    room = torch.empty(index + tensor.numel(), dtype=tensor.dtype)
    room[index:] = tensor
    return room[index:]


def bits_after(kernel: AdamKernel, segments: Sequence[Segment], step: AdamScalars) -> list[np.ndarray]:
    """The bits of all inputs and results after an update, every float32 NaN as one."""
    kernel.update(segments, step)
    tensors = [t for s in segments for t in (s.grad, *s.states, *(s.shadow or ())) if t is not None]
    return [_bits(tensor) for tensor in tensors]


def _bits(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype != torch.float32:
        return tensor.view(torch.int16).numpy().copy()
    return np.where(tensor.isnan().numpy(), np.int32(0x7FC00000), tensor.view(torch.int32).numpy())


def assert_equal(ours: list[np.ndarray], expected: list[np.ndarray]) -> None:
    """The same bits everywhere."""
    for index, (mine, other) in enumerate(zip(ours, expected, strict=True)):
        assert np.array_equal(mine, other), f"tensor {index}: {np.flatnonzero(mine != other)[:9]}"
