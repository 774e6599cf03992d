"""Reads of weights that are still in flight wait for the weights, in every kind of access.

The host is slow in updating, or one rank is late in sending, so what is read too early is old. The oracle is
a plain torch model with the weights that arrive in the end.
"""

import copy
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_runner import run_distributed
from optimizer_runs import LR, SlowKernel, accumulate, build_optimizer, failures_of, host_kernel, on_host
from stale_reads import StaleReadError, no_stale_reads
from torch.func import functional_call, grad, vmap
from torch.nn.modules import module as torch_module
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from patch.config.choices import ZeroStage
from patch.optimizer import OverlappedDistributedOptimizer

WIDTH = 8
LATE_S, CHUNK_S = 0.1, 0.004
INPUTS = torch.linspace(-1, 1, 2 * 3 * WIDTH).view(2, 3, WIDTH)


class Reader(torch.nn.Module):
    """Modules that read parameters of modules which they do not call, among others."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.attention = torch.nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.encoder = torch.nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.recurrent = torch.nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.normed = weight_norm(torch.nn.Linear(WIDTH, WIDTH))
        self.raw = torch.nn.Linear(WIDTH, WIDTH)
        self.kept = torch.nn.Linear(WIDTH, WIDTH)
        self.aside = [self.kept.weight]
        self.idle = torch.nn.Linear(WIDTH, WIDTH)  # which no forward needs
        self.is_regular = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        penalty = sum(p.square().sum() for p in self.parameters()) if self.is_regular else 0.0
        x = self.attention(x, x, x, need_weights=False)[0] + self.normed(x)
        x = self.recurrent(self.encoder(x))[0] @ self.raw.weight
        return self.kept(x).square().mean() + penalty


Read = Callable[[Reader], Any]
Build = Callable[[torch.nn.Module], OverlappedDistributedOptimizer]
READS: dict[str, Read] = {}


def reads(function: Read) -> Read:
    READS[function.__name__] = function
    return function


@reads
def forward(model: Reader) -> Any:
    return model(INPUTS)


@reads
def fast_path_of_an_encoder_in_eval(model: Reader) -> Any:
    with torch.no_grad():
        return model.encoder.eval()(INPUTS)


@reads
def a_weight_in_the_loss(model: Reader) -> Any:
    return model.raw.weight.square().sum() + model.normed.weight.sum()


@reads
def all_weights_in_the_loss_after_forward(model: Reader) -> Any:
    return model(INPUTS) + sum(p.square().sum() for p in model.parameters())


@reads
def all_weights_within_forward(model: Reader) -> Any:
    model.is_regular = True
    return model(INPUTS)


@reads
def a_deep_copy(model: Reader) -> Any:
    return copy.deepcopy(model)(INPUTS)


@reads
def state_dict_of_a_part(model: Reader) -> Any:
    return torch.cat([value.reshape(-1) for value in model.encoder.state_dict().values()])


@reads
def functional(model: Reader) -> Any:
    return functional_call(model, {"raw.bias": torch.ones(WIDTH)}, (INPUTS,))


@reads
def functional_with_gradients(model: Reader) -> Any:
    def loss(weights: dict, x: torch.Tensor) -> torch.Tensor:
        return functional_call(model.kept, weights, (x @ model.raw.weight,)).sum()

    weights = {"weight": model.kept.weight.detach(), "bias": model.kept.bias.detach()}
    return vmap(grad(loss), in_dims=(None, 0))(weights, INPUTS)["weight"]


@reads
def inference_mode(model: Reader) -> Any:
    with torch.inference_mode():
        return model(INPUTS).clone()


@reads
def checkpoints_of_both_kinds(model: Reader) -> Any:
    def part(x: torch.Tensor) -> torch.Tensor:
        return model.kept(x @ model.raw.weight).sum()

    inputs = INPUTS.clone().requires_grad_()
    for use_reentrant in (True, False):
        loss = checkpoint(part, inputs, use_reentrant=use_reentrant)
        gradient = torch.autograd.grad(loss, inputs)[0] if not use_reentrant else loss.detach()
    return gradient


@reads
def threads_that_share_a_model(model: Reader) -> Any:
    def work(_: int) -> torch.Tensor:
        with torch.no_grad():
            return model(INPUTS)

    with ThreadPoolExecutor(3) as threads:
        return torch.stack([*threads.map(work, range(3))])


def offloaded(model: torch.nn.Module) -> OverlappedDistributedOptimizer:
    """All states on a slow host, in many chunks; none is updated ahead: gradients are always clipped."""
    with host_kernel(SlowKernel(CHUNK_S)):
        return build_optimizer(
            model, ZeroStage.NONE, offload=on_host(1.0), clip_grad=1e-3, reduce_bucket_size=1
        )


def begin_step(model: torch.nn.Module, optimizer: OverlappedDistributedOptimizer) -> None:
    """Take a step whose weights are still in flight; with several ranks the last rank sends late."""
    accumulate(model, optimizer, [INPUTS])
    norm = optimizer.get_grad_norm()
    if dist.get_world_size() > 1 and dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(LATE_S)
    optimizer._update(norm, LR)


def with_weights_of(model: Reader) -> Reader:
    """A plain model with equal weights."""
    plain = Reader()
    plain.load_state_dict(model.state_dict())
    return plain


def late(build: Build) -> tuple[Reader, OverlappedDistributedOptimizer]:
    """Return a model whose weights are in flight."""
    model = Reader()
    optimizer = build(model)
    begin_step(model, optimizer)
    return model, optimizer


def check_read(read: Read, build: Build) -> None:
    model, optimizer = late(build)
    found = read(model)
    optimizer.finish_param_sync()
    assert torch.equal(found, read(with_weights_of(model)))
    assert not torch.equal(found, read(Reader())), "the step changed nothing that is read"


def in_parts(model: Reader) -> Callable:
    model.attention.compile(backend="eager")
    model.kept.compile(backend="eager")
    return model


def raw_product(model: Reader) -> Callable:
    return lambda x: x @ model.raw.weight


COMPILED: dict[str, tuple[Read, Read]] = {
    "compiled": (lambda model: torch.compile(model, backend="eager"), lambda model: model),
    "compiled in parts": (in_parts, lambda model: model),
    "a compiled function that reads": (lambda m: torch.compile(raw_product(m), backend="eager"), raw_product),
}


def check_compiled(way: Read, plain: Read) -> None:
    """Two steps, two calls each: the second finds nothing to wait for."""
    torch._dynamo.reset()
    model = Reader()
    optimizer = offloaded(model)
    call = way(model)
    for _ in range(2):
        begin_step(model, optimizer)
        with torch.no_grad():
            found = [call(INPUTS), call(INPUTS)]
        optimizer.finish_param_sync()
        expected = plain(with_weights_of(model))(INPUTS)
        for values in found:
            torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-7)


def check_late_backward_is_loud(is_kept: bool) -> None:
    """The optimizer cannot see reads of a tensor taken before the step, nor an older graph.

    As with torch's own optimizers, autograd raises in backward.
    """
    model = Reader()
    optimizer = offloaded(model) if is_kept else build_optimizer(model, ZeroStage.NONE)
    inputs, weight = INPUTS.clone().requires_grad_(), model.aside[0]
    loss = None if is_kept else (inputs @ weight).sum()
    begin_step(model, optimizer)
    loss = (inputs @ weight).sum() if loss is None else loss
    optimizer.finish_param_sync()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def check_debug_mode_tells() -> None:
    """The tests' own alarm rings where a tensor that was taken before is read."""
    model, optimizer = late(offloaded)
    with no_stale_reads(optimizer), pytest.raises(StaleReadError, match=r"kept.weight, which is on its way"):
        model.aside[0].sum()
    with no_stale_reads(optimizer):
        model(INPUTS)


def check_loaded_weights_stay(build: Build) -> None:
    """Late ones do not overwrite them."""
    loaded = Reader(seed=7)
    model, optimizer = late(build)
    model.load_state_dict(loaded.state_dict())
    optimizer.finish_param_sync()
    assert all(map(torch.equal, model.parameters(), loaded.parameters()))


def check_only_own_modules_wait(build: Build) -> None:
    """The original's hooks are global: a forward of any other module waits."""
    model, optimizer = late(build)
    assert not torch_module._global_forward_pre_hooks and not torch_module._global_forward_hooks
    torch.nn.Linear(4, 4)(torch.ones(4))
    assert len(optimizer.schedule.pending) == len(optimizer.grad_buffer.buckets)
    optimizer.finish_param_sync()


CHECKS: dict[str, Callable[[], None]] = {
    **{name: partial(check_read, read, offloaded) for name, read in READS.items()},
    **{name: partial(check_compiled, *ways) for name, ways in COMPILED.items()},
    "kept reference": partial(check_late_backward_is_loud, True),
    "graph of before": partial(check_late_backward_is_loud, False),
    "debug mode": check_debug_mode_tells,
}
SHARDED_CHECKS: dict[str, Callable[[], None]] = {}
for stage in (ZeroStage.OPTIMIZER, ZeroStage.GRADIENTS):
    build_sharded = partial(build_optimizer, zero_stage=stage, reduce_bucket_size=1)
    for name in ("forward", "fast_path_of_an_encoder_in_eval", "a_deep_copy", "state_dict_of_a_part"):
        SHARDED_CHECKS[f"{name} {stage.name}"] = partial(check_read, READS[name], build_sharded)
    for check in (check_loaded_weights_stay, check_only_own_modules_wait):
        SHARDED_CHECKS[f"{check.__name__} {stage.name}"] = partial(check, build_sharded)


def run_checks(rank: int, world_size: int) -> dict[str, str]:
    return failures_of(SHARDED_CHECKS if world_size > 1 else CHECKS)


@pytest.fixture(scope="module")
def alone() -> dict[str, str]:
    return run_distributed(run_checks, 1)[0]


@pytest.fixture(scope="module")
def sharded() -> list[dict[str, str]]:
    return run_distributed(run_checks, 2)


@pytest.mark.long
@pytest.mark.parametrize("check", CHECKS)
def test_weights_of_a_slow_host(alone: dict[str, str], check: str) -> None:
    assert not alone[check]


@pytest.mark.long
@pytest.mark.parametrize("check", SHARDED_CHECKS)
def test_weights_of_a_late_rank(sharded: list[dict[str, str]], check: str) -> None:
    assert [rank[check] for rank in sharded] == ["", ""]
