"""Simulate several machines with accelerators on one machine: cables of a chosen speed, layers that wait.

Each rank has a network namespace, and a cable from it to a switch in one more namespace. The host's network
does not change: both ends of a cable are created inside the namespaces, whose only other interface is the
loopback. This needs root, and `ip` and `tc` of iproute2.

The thread that waits in a layer also runs the hooks. The host of a real accelerator runs ahead and hides the
work of hooks. Here this work lengthens the step of every contender.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from toolkits.benchmarks._report import NotRunError

INTERFACE = "cable"
"""Name of the cable's interface in each rank's namespace."""
_BURST, _QUEUE = "256kb", "4mb"
"""Room for the largest packet of the network stack, and a queue that TCP fills without losses."""
_FIRST_MBIT, MANY_TIMES = 300.0, 3


@contextmanager
def connected(ends: int = 2) -> Iterator[list[str]]:
    """Create and connect a namespace for each of `ends` ranks, and always remove them at the end.

    Within the context SIGTERM raises KeyboardInterrupt, as Ctrl-C does.

    Yields:
        the names of the namespaces.
    Raises:
        NotRunError: the user is not root, iproute2 is missing, or the kernel refuses.
    """
    if os.geteuid() != 0:
        raise NotRunError("network namespaces need root")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise NotRunError(f"`{tool}` not found; install iproute2")
    switch, *names = (f"overlap-{os.getpid()}-{end}" for end in ("switch", *range(ends)))
    on_terminate = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _connect(switch, names)
        yield names
    finally:  # deleting a namespace deletes its cable; Ctrl-C and SIGTERM are ignored meanwhile
        on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for name in (switch, *names):
            if os.path.exists(f"/run/netns/{name}"):
                subprocess.run(["ip", "netns", "delete", name], check=False)
        signal.signal(signal.SIGTERM, on_terminate)
        signal.signal(signal.SIGINT, on_interrupt)


def _connect(switch: str, names: list[str]) -> None:
    _run("ip", "netns", "add", switch)
    _run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
    _run("ip", "-n", switch, "link", "set", "switch", "up")
    for end, name in enumerate(names):
        port = f"port{end}"
        _run("ip", "netns", "add", name)
        cable = ["type", "veth", "peer", "name", port, "netns", switch]
        _run("ip", "link", "add", INTERFACE, "netns", name, *cable)
        _run("ip", "-n", switch, "link", "set", port, "master", "switch", "up")
        # An address block for documentation (RFC 5737).
        _run("ip", "-n", name, "address", "add", f"192.0.2.{end + 1}/24", "dev", INTERFACE)
        for device in ("lo", INTERFACE):
            _run("ip", "-n", name, "link", "set", device, "up")


def enter(namespace: str) -> None:
    """Move this thread, and all threads and programs that it starts later, into a namespace."""
    with open(f"/run/netns/{namespace}", encoding="ascii") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotRunError(f"`{' '.join(command)}`: {done.stderr.strip()}")


def set_speed(send: Callable[[], float], seconds: float) -> float:
    """Limit this namespace's sending speed so that messages take `seconds`; return the speed in Mbit/s.

    Args:
        send: sends the messages, and returns the seconds of the slowest rank.
        seconds: wanted time of the messages.
    """
    mbit = _FIRST_MBIT
    for last in range(MANY_TIMES + 1):  # iterative: headers and latency are part of the time
        rate = ["tbf", "rate", f"{mbit:.1f}mbit", "burst", _BURST, "limit", _QUEUE]
        _run("tc", "qdisc", "replace", "dev", INTERFACE, "root", *rate)
        if last < MANY_TIMES:
            mbit *= min(send() for _ in range(MANY_TIMES)) / seconds
    return mbit


_FORWARD_SHARE = 1 / 3
"""Forward's share of a layer's time. Backward has twice as many matrix products."""
_ORDER = (
    "input_layernorm", "self_attention.linear_qkv", "self_attention.linear_proj", "pre_mlp_layernorm",
    "mlp.linear_fc1", "mlp.linear_fc2",
)  # fmt: skip
"""Modules of a layer that have weights, in the order of forward."""
_MAX_LATE_S = 1e-3
"""A sleeping thread wakes up later than this only if other work takes its core."""


class _Device:
    """A device that works for given times, one after the other, while this thread waits."""

    late_s = 0.0

    @contextmanager
    def work(self, seconds: float) -> Iterator[None]:
        """Take `seconds`, including the work within the context. A late end shortens the next wait."""
        end = time.perf_counter() + seconds - self.late_s
        yield
        time.sleep(max(0.0, end - time.perf_counter()))
        self.late_s = min(max(0.0, time.perf_counter() - end), _MAX_LATE_S)


DEVICE = _Device()
"""Device of this process."""


class _Wait(torch.autograd.Function):
    """Function that waits in forward and backward. Weight gradients are noise times the gradient's norm."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, seconds: float, noise: list[torch.Tensor], *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.seconds, ctx.noise = seconds, noise
        with DEVICE.work(seconds * _FORWARD_SHARE):
            return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        with DEVICE.work(ctx.seconds * (1 - _FORWARD_SHARE)):
            scale = gradient.norm()
            return gradient, None, None, *(part * scale for part in ctx.noise)


def _waiting(module: torch.nn.Module, seconds: float, generator: torch.Generator) -> Any:
    """Return a forward that reads the module's weights, as a matrix product does, but changes nothing."""
    names = [name for name, _ in module.named_parameters(recurse=False)]
    noise = [torch.randn(one.shape, generator=generator).to(one.dtype) for one in module.parameters()]
    return lambda hidden: _Wait.apply(hidden, seconds, noise, *(getattr(module, name) for name in names))


def _waiting_layer(modules: list[torch.nn.Module]) -> Any:

    def forward(hidden_states: torch.Tensor, **unused: Any) -> tuple[torch.Tensor, None]:
        for module in modules:
            hidden_states = module(hidden_states)
        return hidden_states, None

    return forward


def let_layers_wait(model: torch.nn.Module, wait_s: float, rank: int) -> None:
    """Let a model's layers wait: a matrix for a time in proportion to its elements, a norm not at all.

    Args:
        model: a model of megatron-core. Names and shapes of its weights do not change.
        wait_s: seconds per micro-batch for all layers, forward and backward.
        rank: seeds the gradients, which differ between ranks.
    """
    layers = [*model.get_submodule("decoder.layers").children()]
    for index, layer in enumerate(layers):
        generator = torch.Generator().manual_seed(rank * len(layers) + index)
        modules = [layer.get_submodule(name) for name in _ORDER]
        numels = [sum(one.numel() for one in module.parameters() if one.dim() > 1) for module in modules]
        for module, numel in zip(modules, numels, strict=True):
            seconds = wait_s / len(layers) * numel / sum(numels)
            vars(module)["forward"] = _waiting(module, seconds, generator)
        vars(layer)["forward"] = _waiting_layer(modules)
