"""Update items for the Adam kernels: all kinds of states, with values that are hard to round."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from patch.config.choices import MomentType
from patch.optimizer.kernels.low_bit_moments import DTYPES, RngCoords, scale_name
from patch.optimizer.kernels.numpy_adam import low_bits, round_to_bf16
from patch.optimizer.kernels.spec import AdamKernel, AdamScalars, AdamStates, UpdateItem

MOMENTS: list[tuple[MomentType, MomentType]] = [
    ("bf16", "bf16"), ("8bit", "8bit"), ("bf16", "8bit"), ("8bit", "fp32"), ("fp32", "bf16"),
]  # fmt: skip
FORMS = ("fp32 weight", "bf16 weight", "fp16 weight", "split master")
SPECIAL = np.array(
    [0.0, -0.0, 1e-45, -1e-40, 1e-38, 3e38, -3e38, 1e19, -1e-19, 1.0, np.inf, -np.inf, np.nan], np.float32
)
SIZES = (1, 2, 3, 31, 4099)
BLOCKS = (64, 128, 192, 64, 4160)
"""Block sizes with 8-bit moments."""
# Part of a matrix that begins within a row. Its random counters need more than 32 bits.
DRAW = RngCoords("layer.weight", first=2**32 - 999, row=37, stride=111, skip=5)


def scalars(**changes: Any) -> AdamScalars:
    usual = {"lr": 3e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 3}
    return AdamScalars(**usual | {"grad_scale": 0.37} | changes)


class Sgd(AdamScalars):
    """Scalars of states without a second moment."""

    momentum = property(lambda self: self.beta1)


RULES = [
    scalars(),
    scalars(decoupled_weight_decay=False),
    *(Sgd(lr=3e-4, beta1=m, beta2=0, eps=1, weight_decay=0.1, step=1, grad_scale=0.37) for m in (0.9, 0)),
]
"""AdamW, Adam, SGD with momentum, and without."""
RULE_NAMES = ["AdamW", "Adam", "SGD", "SGD without momentum"]


def make_items(
    form: str,
    grad_dtype: torch.dtype,
    step: AdamScalars | None = None,
    *,
    seed: int = 0,
    scale: float = 1.0,
    has_out: bool = False,
    sizes: Sequence[int] = SIZES,
    device: str = "cpu",
    moments: tuple[MomentType, MomentType] = ("fp32", "fp32"),
) -> list[UpdateItem]:
    """Return items of two groups, the same for the same seed. Only the first group's addresses are aligned.

    `step` is the first group's; the second has half its learning rate and no weight decay. With 8-bit moments
    all values are finite.
    """
    first = step or scalars()
    groups = first, replace(first, lr=first.lr / 2, weight_decay=0.0)
    generator = np.random.default_rng(seed)
    items = []
    for index, numel in enumerate(sizes):

        def place(tensor: torch.Tensor, index: int = index) -> torch.Tensor:
            room = torch.empty(index + tensor.numel(), dtype=tensor.dtype, device=device)
            room[index:] = tensor
            return room[index:]

        master, grad, exp_avg, exp_avg_sq = (_values(generator, scale, numel) for _ in range(4))
        if "8bit" in moments:
            kept = (np.nan_to_num(x, posinf=0, neginf=0) for x in (master, grad, exp_avg, exp_avg_sq))
            master, grad, exp_avg, exp_avg_sq = (np.where(np.abs(x) > 1e18, scale, x) for x in kept)
        states = _narrowed(_states(form, master, exp_avg, np.abs(exp_avg_sq)), moments)
        if isinstance(first, Sgd):
            states = states._replace(exp_avg_sq=None, **{} if first.beta1 else {"exp_avg": None})
        out = AdamStates(*(t if t is None else place(torch.full_like(t, 7)) for t in states))
        states = AdamStates(*(t if t is None else place(t) for t in states))
        gradient = place(torch.from_numpy(grad).to(grad_dtype))
        items.append(UpdateItem(gradient, states, groups[index % 2], out if has_out else None, DRAW))
    return items


def _values(generator: np.random.Generator, scale: float, numel: int) -> np.ndarray:
    """Return normal numbers. A tenth is special values, a tenth is midpoints between two bf16 numbers."""
    values = (generator.normal(0, 1, numel) * scale).astype(np.float32)
    kind = generator.integers(0, 10, numel)
    values = np.where(kind == 0, generator.choice(SPECIAL, numel), values)
    halves = (values.view(np.uint32) & np.uint32(0xFFFF0000) | np.uint32(0x8000)).view(np.float32)
    return np.where(kind == 1, halves, values)


def _states(form: str, master: np.ndarray, exp_avg: np.ndarray, exp_avg_sq: np.ndarray) -> AdamStates:
    weight = {
        "fp32 weight": None,
        "fp16 weight": torch.zeros(len(master), dtype=torch.float16),
    }.get(form, torch.from_numpy(round_to_bf16(master).view(np.int16)).view(torch.bfloat16))
    if form == "split master":
        master = low_bits(master).view(np.int16)
    return AdamStates(*map(torch.from_numpy, (master, exp_avg, exp_avg_sq)), weight)


def _narrowed(states: AdamStates, moments: tuple[MomentType, MomentType]) -> AdamStates:
    """Return the states with moments of other dtypes: all 8-bit codes, and some scales of zero."""
    changed: dict[str, torch.Tensor] = {}
    for name, kind in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
        values = getattr(states, name)
        changed[name] = values.to(DTYPES[kind])
        if kind == "8bit":
            changed[name] = (torch.arange(values.numel()) * 97 % 256).to(torch.uint8)
            blocks = values.view(-1, 64).abs()
            changed[scale_name(name)] = blocks[:, 0].contiguous()
    return states._replace(**changed)


def bits_after(kernel: AdamKernel, items: Sequence[UpdateItem]) -> list[np.ndarray]:
    """Return the bits of all inputs and results after an update, every float NaN as the same NaN.

    Processors differ in the NaN of a cast to float16.
    """
    kernel.update(items)
    tensors = [t.cpu() for s in items for t in (s.grad, *s.states, *(s.out or ())) if t is not None]
    return [_bits(tensor) for tensor in tensors]


def _bits(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.uint8:
        return tensor.numpy().copy()
    if tensor.dtype not in (torch.float32, torch.float16):
        return tensor.view(torch.int16).numpy().copy()
    bits = torch.int32 if tensor.dtype == torch.float32 else torch.int16
    return tensor.where(~tensor.isnan(), torch.nan).view(bits).numpy()


def assert_equal(ours: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for index, (mine, other) in enumerate(zip(ours, expected, strict=True)):
        assert np.array_equal(mine, other), f"tensor {index}: {np.flatnonzero(mine != other)[:9]}"
