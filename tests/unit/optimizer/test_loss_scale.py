"""fp16's scale of the loss: megatron-core's own scalers are the oracle, step by step and after a resume."""

import random

import pytest
import torch
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler
from torch.overrides import TorchFunctionMode

from patch.config.schema import OptimizerConfig
from patch.optimizer.loss_scale import LossScale, loss_scale_of

FP16 = [torch.float16]


class _OnTheHost(TorchFunctionMode):
    """Tensors that upstream makes on a GPU are made here."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        return function(*args, **({**kwargs, "device": "cpu"} if "device" in kwargs else kwargs))


def _upstream(config: OptimizerConfig) -> DynamicGradScaler:
    with _OnTheHost():
        return DynamicGradScaler(
            config.initial_loss_scale, config.min_loss_scale, growth_factor=2.0, backoff_factor=0.5,
            growth_interval=config.loss_scale_window, hysteresis=config.hysteresis,
        )  # fmt: skip


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize("smallest", [1.0, 2.0**-7, 4.0])
def test_scale_is_upstreams_after_every_step_and_a_resume(hysteresis: int, smallest: float) -> None:
    config = OptimizerConfig(
        lr=1.0, initial_loss_scale=32.0, loss_scale_window=3, min_loss_scale=smallest, hysteresis=hysteresis
    )
    theirs, ours = _upstream(config), loss_scale_of(config, FP16)
    rng = random.Random(hysteresis)
    for step in range(200):
        is_overflow = rng.random() < 0.45
        theirs.update(is_overflow)
        ours.shrink() if is_overflow else ours.keep()
        assert ours.value == theirs.scale.item(), f"step {step}"
        if step % 7 == 0:
            saved, ours = ours.state_dict(), loss_scale_of(config, FP16)
            ours.load_state_dict(saved)


def test_constant_scale_stays_cures_no_overflow_and_is_for_fp16_alone() -> None:
    with _OnTheHost():
        theirs = ConstantGradScaler(128.0)
    ours = loss_scale_of(OptimizerConfig(lr=1.0, loss_scale=128.0), FP16)
    for is_overflow in (False, True, False):
        theirs.update(is_overflow)
        assert not ours.may_cure  # so that an overflow is no reason to change it
        if not is_overflow:
            ours.keep()
        assert ours.value == theirs.scale.item()
    ours.load_state_dict(LossScale(4.0, 1000).state_dict())
    assert ours.value == 128.0
    assert loss_scale_of(OptimizerConfig(lr=1.0, loss_scale=8.0), [torch.bfloat16]).value == 1.0


@pytest.mark.parametrize(("hysteresis", "overflows"), [(1, 1), (2, 2)])
def test_overflow_is_no_fault_while_the_scale_shrinks_now_or_soon(hysteresis: int, overflows: int) -> None:
    scale = LossScale(2.0, 10, smallest=1.0, hysteresis=hysteresis)
    for _ in range(overflows):
        assert scale.may_cure
        scale.shrink()
    assert scale.value == 1.0 and not scale.may_cure
