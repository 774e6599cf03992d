"""Layers that wait instead of computing, as the host of an accelerator does; their weights are real.

The thread that waits is also the one in which hooks run. The host of an accelerator runs ahead of it, so that
there the work of hooks is hidden; here it lengthens the step, whoever's hooks they are.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_FORWARD_SHARE = 1 / 3
"""Share of a layer's time; backward has twice as many products."""
_ORDER = (
    "input_layernorm",
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "pre_mlp_layernorm",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
"""The modules of a layer that have weights, in the order of forward."""
_MAX_LATE_S = 1e-3
"""A thread that sleeps wakes up later than this only where other work takes its core."""


class _Device:
    """A device that works for given times, one after the other, while this thread waits."""

    def __init__(self) -> None:
        self._late_s = 0.0

    @contextmanager
    def work(self, seconds: float) -> Iterator[None]:
        """Takes `seconds`, what is done within it included. A wait that ended late shortens the next ones."""
        end = time.perf_counter() + seconds - self._late_s
        yield
        time.sleep(max(0.0, end - time.perf_counter()))
        self._late_s = min(max(0.0, time.perf_counter() - end), _MAX_LATE_S)


_DEVICE = _Device()


class _Wait(torch.autograd.Function):
    """Waits in forward and in backward; a weight's gradient is `noise`, as large as the hidden states'."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, seconds: float, noise: list[torch.Tensor], *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.seconds, ctx.noise = seconds, noise
        with _DEVICE.work(seconds * _FORWARD_SHARE):
            return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        with _DEVICE.work(ctx.seconds * (1 - _FORWARD_SHARE)):
            scale = gradient.norm() if ctx.noise else None
            return gradient, None, None, *(part * scale for part in ctx.noise)


class _WaitingModule(torch.nn.Module):
    """In place of a module, with the weights that are its own; forward and backward take `seconds`."""

    def __init__(self, module: torch.nn.Module, seconds: float, generator: torch.Generator) -> None:
        super().__init__()
        self._seconds = seconds
        for name, parameter in module.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        self._names = [name for name, _ in self.named_parameters()]
        self._noise = [torch.randn(one.shape, generator=generator).to(one.dtype) for one in self.parameters()]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The hidden states, unchanged; the weights are read, as by a product."""
        weights = [getattr(self, name) for name in self._names]
        return _Wait.apply(hidden, self._seconds, self._noise, *weights)


class WaitingLayer(torch.nn.Module):
    """In place of a transformer layer; forward and backward together take `seconds`.

    Args:
        layer: its weights are kept, and get gradients that differ from rank to rank; None: there are none.
        seconds: of forward and backward; a matrix waits for its share of the elements, a norm does not.
        seed: of the gradients.
    """

    def __init__(self, layer: torch.nn.Module | None, seconds: float, seed: int = 0) -> None:
        super().__init__()
        self.layer = torch.nn.Module() if layer is None else layer
        self._parts: list[str] = []
        generator = torch.Generator().manual_seed(seed)
        own = {
            name: [one for one in module.parameters(recurse=False) if one.dim() > 1]
            for name, module in self.layer.named_modules()
            if any(True for _ in module.parameters(recurse=False))
        }
        numels = {name: sum(one.numel() for one in matrices) for name, matrices in own.items()}
        for name in sorted(own, key=_ORDER.index):
            share = seconds * numels[name] / sum(numels.values())
            waiting = _WaitingModule(self.layer.get_submodule(name), share, generator)
            self.layer.set_submodule(name, waiting)
            self._parts.append(name)
        self._alone_s = 0.0 if own else seconds

    def forward(self, hidden_states: torch.Tensor, **unused: Any) -> tuple[torch.Tensor, None]:
        """Upstream's protocol: hidden states and no cross-attention context."""
        if not self._parts:
            return _Wait.apply(hidden_states, self._alone_s, []), None
        for name in self._parts:
            hidden_states = self.layer.get_submodule(name)(hidden_states)
        return hidden_states, None


def let_layers_wait(model: torch.nn.Module, wait_s: float, rank: int) -> None:
    """Put waiting layers in the place of a model's layers.

    Args:
        model: megatron-core's; names and places of its weights do not change.
        wait_s: seconds of a micro-batch in all of its layers.
        rank: gradients differ from rank to rank.
    """
    layers = model.get_submodule("decoder.layers")
    assert isinstance(layers, torch.nn.ModuleList)
    for index in range(len(layers)):
        seed = rank * len(layers) + index
        layers[index] = WaitingLayer(layers[index], wait_s / len(layers), seed)
