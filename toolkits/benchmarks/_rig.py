"""One machine as several with accelerators: cables of a chosen speed, layers that wait instead of computing.

Each rank has a network namespace with a cable of its own to a switch, in a namespace more. The host's network
does not change: both ends of a cable are created inside the namespaces, which have no other interface than
their loopback. It needs root, and `ip` and `tc` of iproute2.

The thread that waits in a layer is also the one in which hooks run. The host of an accelerator runs ahead of
it, so that there the work of hooks is hidden; here it lengthens the step, whoever's hooks they are.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch

from toolkits.benchmarks._measure import COMMUNICATION, COMPUTE, take_turns
from toolkits.benchmarks._report import NotRunError

INTERFACE = "cable"
"""Name of the cable's interface in the namespace of each rank."""
_BURST, _QUEUE = "256kb", "4mb"
"""Space for the largest packet that the network stack sends, and a queue that TCP fills without losses."""
_FIRST_MBIT, _MANY_TIMES = 300.0, 3


class CableError(NotRunError):
    """Namespaces cannot be created on this machine or by this user; the message says why."""


class Cables:
    """A context manager that creates the namespaces and always removes them at the end.

    Within it SIGTERM raises KeyboardInterrupt, as Ctrl-C does.

    Args:
        ends: how many ranks are connected.
    """

    def __init__(self, ends: int = 2) -> None:
        self.namespaces = [f"overlap-{os.getpid()}-{end}" for end in range(ends)]
        self._switch = f"overlap-{os.getpid()}-switch"
        self._on_terminate: Any = None

    def __enter__(self) -> Cables:
        """Create the namespaces and the cables.

        Raises:
            CableError: this user is not root, iproute2 is missing, or the kernel refuses.
        """
        if os.geteuid() != 0:
            raise CableError("network namespaces need root")
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                raise CableError(f"`{tool}` not found; install iproute2")
        self._on_terminate = signal.signal(signal.SIGTERM, _interrupt)
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def inside(self, end: int, command: list[str]) -> list[str]:
        """The command that runs `command` in one of the namespaces."""
        return ["ip", "netns", "exec", self.namespaces[end], *command]

    def _make(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "switch", "up")
        for end, name in enumerate(self.namespaces):
            port = f"port{end}"
            _run("ip", "netns", "add", name)
            cable = ["type", "veth", "peer", "name", port, "netns", self._switch]
            _run("ip", "link", "add", INTERFACE, "netns", name, *cable)
            _run("ip", "-n", self._switch, "link", "set", port, "master", "switch", "up")
            # A network kept for documentation (RFC 5737).
            _run("ip", "-n", name, "address", "add", f"192.0.2.{end + 1}/24", "dev", INTERFACE)
            for device in ("lo", INTERFACE):
                _run("ip", "-n", name, "link", "set", device, "up")

    def _remove(self) -> None:
        """Remove the namespaces and with them the cables; Ctrl-C and SIGTERM are ignored meanwhile."""
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for name in (*self.namespaces, self._switch):
            if os.path.exists(f"/run/netns/{name}"):
                subprocess.run(["ip", "netns", "delete", name], check=False)
        signal.signal(signal.SIGTERM, self._on_terminate)
        signal.signal(signal.SIGINT, previous)


def _interrupt(*unused: Any) -> None:
    raise KeyboardInterrupt


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CableError(f"`{' '.join(command)}`: {done.stderr.strip()}")


def set_speed(send: Callable[[], float], seconds: float) -> float:
    """Limit the sending speed of this process's namespace so that messages take a time; Mbit/s.

    Args:
        send: sends the messages, and returns the seconds of the slowest rank.
        seconds: which it shall take.
    """
    mbit = _FIRST_MBIT
    for last in range(_MANY_TIMES + 1):  # headers and waits are a part of the time: it is found step by step
        rate = ["tbf", "rate", f"{mbit:.1f}mbit", "burst", _BURST, "limit", _QUEUE]
        _run("tc", "qdisc", "replace", "dev", INTERFACE, "root", *rate)
        if last < _MANY_TIMES:
            mbit *= min(send() for _ in range(_MANY_TIMES)) / seconds
    return mbit


def compare(timed: Mapping[str, Callable[[], float]], rounds: int, share: float = 1.0) -> dict[str, Any]:
    """The rounds of contenders, over a cable whose speed is set first.

    Args:
        timed: by name; each takes a step and returns the seconds of the slowest rank. Compute alone and
            communication alone are among them.
        rounds: how often each takes a step.
        share: what communication alone takes of the time of compute alone; 0: the speed remains, and so
            does what the contenders have built in their first step.
    """
    mbit = 0.0
    if share:
        for step in timed.values():
            step()
        compute = min(timed[COMPUTE]() for _ in range(_MANY_TIMES))
        mbit = set_speed(timed[COMMUNICATION], share * compute)
    return {"mbit": mbit, "rounds": take_turns(timed, rounds)}


def way_of(measured: Mapping[str, Any]) -> str:
    """How the ranks of a comparison met, for people."""
    return f"a cable of {measured['mbit']:.0f} Mbit/s each way"


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
        begin = time.perf_counter()
        end = begin + seconds - self._late_s
        yield
        time.sleep(max(0.0, end - time.perf_counter()))
        self._late_s = min(max(0.0, time.perf_counter() - end), _MAX_LATE_S)


DEVICE = _Device()
"""That of this process."""


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


class _WaitingWeights(torch.nn.Module):
    """In place of a transformer layer, whose weights get gradients that differ from rank to rank.

    Args:
        layer: of megatron-core.
        seconds: of forward and backward; a matrix waits for its share of the elements, a norm does not.
        seed: of the gradients.
    """

    def __init__(self, layer: torch.nn.Module, seconds: float, seed: int) -> None:
        super().__init__()
        self.layer = layer
        generator = torch.Generator().manual_seed(seed)
        modules = [layer.get_submodule(name) for name in _ORDER]
        numels = [sum(one.numel() for one in module.parameters() if one.dim() > 1) for module in modules]
        for name, module, numel in zip(_ORDER, modules, numels, strict=True):
            waiting = _WaitingModule(module, seconds * numel / sum(numels), generator)
            layer.set_submodule(name, waiting)

    def forward(self, hidden_states: torch.Tensor, **unused: Any) -> tuple[torch.Tensor, None]:
        """Upstream's protocol: hidden states and no cross-attention context."""
        for name in _ORDER:
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
        layers[index] = _WaitingWeights(layers[index], wait_s / len(layers), seed)
