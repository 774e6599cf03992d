"""One machine as several with accelerators: cables of a chosen speed, layers that wait instead of computing.

Each rank has a network namespace with a cable of its own to a switch, which has one more namespace. The
network of the host does not change: both ends of a cable are created inside the namespaces, which have no
other interface than their loopback. It needs root, and `ip` and `tc` of iproute2.

The thread that waits in a layer is also the thread in which hooks run. The host of an accelerator runs ahead
of the accelerator and hides the work of hooks; here this work lengthens the step of each contender.
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
"""Name of the cable's interface in the namespace of each rank."""
_BURST, _QUEUE = "256kb", "4mb"
"""Space for the largest packet that the network stack sends, and a queue that TCP fills without losses."""
_FIRST_MBIT, MANY_TIMES = 300.0, 3


@contextmanager
def connected(ends: int = 2) -> Iterator[list[str]]:
    """Create a namespace for each of `ends` ranks, connect them, and always remove them at the end.

    Within the context SIGTERM raises KeyboardInterrupt, as Ctrl-C does.

    Yields:
        The names of the ranks' namespaces.
    Raises:
        NotRunError: this user is not root, iproute2 is missing, or the kernel refuses.
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
    finally:  # with the namespaces their cables go; Ctrl-C and SIGTERM are ignored meanwhile
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
        # A network kept for documentation (RFC 5737).
        _run("ip", "-n", name, "address", "add", f"192.0.2.{end + 1}/24", "dev", INTERFACE)
        for device in ("lo", INTERFACE):
            _run("ip", "-n", name, "link", "set", device, "up")


def enter(namespace: str) -> None:
    """Move this thread, and the threads and programs that it starts later, into a namespace."""
    with open(f"/run/netns/{namespace}", encoding="ascii") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotRunError(f"`{' '.join(command)}`: {done.stderr.strip()}")


def set_speed(send: Callable[[], float], seconds: float) -> float:
    """Limit the sending speed of this process's namespace so that messages take a time; return it in Mbit/s.

    Args:
        send: sends the messages, and returns the seconds of the slowest rank.
        seconds: the time that the messages shall take.
    """
    mbit = _FIRST_MBIT
    for last in range(MANY_TIMES + 1):  # headers and waits are a part of the time: it is found step by step
        rate = ["tbf", "rate", f"{mbit:.1f}mbit", "burst", _BURST, "limit", _QUEUE]
        _run("tc", "qdisc", "replace", "dev", INTERFACE, "root", *rate)
        if last < MANY_TIMES:
            mbit *= min(send() for _ in range(MANY_TIMES)) / seconds
    return mbit


_FORWARD_SHARE = 1 / 3
"""Share of a layer's time; backward has twice as many products."""
_ORDER = (
    "input_layernorm", "self_attention.linear_qkv", "self_attention.linear_proj", "pre_mlp_layernorm",
    "mlp.linear_fc1", "mlp.linear_fc2",
)  # fmt: skip
"""The modules of a layer that have weights, in the order of forward."""
_MAX_LATE_S = 1e-3
"""A thread that sleeps wakes up later than this only if other work takes its core."""


class _Device:
    """A device that works for given times, one after the other, while this thread waits."""

    late_s = 0.0

    @contextmanager
    def work(self, seconds: float) -> Iterator[None]:
        """Take `seconds`, including the work within the context. A wait that ended late shortens the next."""
        end = time.perf_counter() + seconds - self.late_s
        yield
        time.sleep(max(0.0, end - time.perf_counter()))
        self.late_s = min(max(0.0, time.perf_counter() - end), _MAX_LATE_S)


DEVICE = _Device()
"""The device of this process."""


class _Wait(torch.autograd.Function):
    """Waits in forward and in backward; a weight's gradient is `noise`, as large as the hidden states'."""

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
    """Return a forward that reads the module's weights, as a product does, and changes nothing."""
    names = [name for name, _ in module.named_parameters(recurse=False)]
    noise = [torch.randn(one.shape, generator=generator).to(one.dtype) for one in module.parameters()]
    return lambda hidden: _Wait.apply(hidden, seconds, noise, *(getattr(module, name) for name in names))


def _waiting_layer(modules: list[torch.nn.Module]) -> Any:
    """Return a forward with the parameters and results of megatron-core's layers."""

    def forward(hidden_states: torch.Tensor, **unused: Any) -> tuple[torch.Tensor, None]:
        for module in modules:
            hidden_states = module(hidden_states)
        return hidden_states, None

    return forward


def let_layers_wait(model: torch.nn.Module, wait_s: float, rank: int) -> None:
    """Let a model's layers wait; a matrix waits for its share of the elements, a norm does not.

    Args:
        model: megatron-core's; names and places of its weights do not change.
        wait_s: seconds of a micro-batch in all of its layers, forward and backward.
        rank: gradients differ from rank to rank.
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
