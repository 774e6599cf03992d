"""Network namespaces connected by virtual cables of a chosen speed, one for each rank on one machine.

Two are connected by one cable; more are each connected by a cable of their own to a switch, in a namespace
more. The host's network does not change: both ends of a cable are created inside the namespaces, which have
no other interface than their loopback. It needs root, and `ip` and `tc` of iproute2.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from types import TracebackType
from typing import Any

from toolkits.benchmarks._report import NotRunError

INTERFACE = "cable"
"""Name of the cable's interface in the namespace of each rank."""

# Space for the largest packet that the network stack sends, and a queue that TCP fills without losses.
_BURST, _QUEUE = "256kb", "4mb"


class LinkError(NotRunError):
    """Namespaces cannot be created on this machine or by this user; the message says why."""


class Link:
    """A context manager that creates the namespaces and always removes them at the end.

    Within it SIGTERM raises KeyboardInterrupt, as Ctrl-C does.

    Args:
        ends: how many ranks are connected.
    """

    def __init__(self, ends: int = 2) -> None:
        self.namespaces = [f"overlap-{os.getpid()}-{end}" for end in range(ends)]
        self._switch = f"overlap-{os.getpid()}-switch"
        self._on_terminate: Any = None

    def __enter__(self) -> Link:
        """Create the namespaces and the cables.

        Raises:
            LinkError: this user is not root, iproute2 is missing, or the kernel refuses.
        """
        if os.geteuid() != 0:
            raise LinkError("network namespaces need root")
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                raise LinkError(f"`{tool}` not found; install iproute2")
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
        for name in self.namespaces:
            _run("ip", "netns", "add", name)
        if len(self.namespaces) == 2:
            first, second = self.namespaces
            _add_cable(first, second, INTERFACE)
        else:
            self._make_switch()
        for end, name in enumerate(self.namespaces):
            # A network kept for documentation (RFC 5737).
            _run("ip", "-n", name, "address", "add", f"192.0.2.{end + 1}/24", "dev", INTERFACE)
            for device in ("lo", INTERFACE):
                _run("ip", "-n", name, "link", "set", device, "up")

    def _make_switch(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "switch", "up")
        for end, name in enumerate(self.namespaces):
            port = f"port{end}"
            _add_cable(name, self._switch, port)
            _run("ip", "-n", self._switch, "link", "set", port, "master", "switch", "up")

    def _remove(self) -> None:
        """Remove the namespaces and with them the cables; Ctrl-C and SIGTERM are ignored meanwhile."""
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for name in (*self.namespaces, self._switch):
            if os.path.exists(f"/run/netns/{name}"):
                subprocess.run(["ip", "netns", "delete", name], check=False)
        signal.signal(signal.SIGTERM, self._on_terminate)
        signal.signal(signal.SIGINT, previous)


def _add_cable(first: str, second: str, other_end: str) -> None:
    """From `INTERFACE` in one namespace to the interface `other_end` in another."""
    cable = ["type", "veth", "peer", "name", other_end, "netns", second]
    _run("ip", "link", "add", INTERFACE, "netns", first, *cable)


def _interrupt(*unused: Any) -> None:
    raise KeyboardInterrupt


def limit_speed(mbit: float) -> None:
    """Limit the sending speed of this process's namespace to `mbit` Mbit/s, headers included."""
    rate = ["tbf", "rate", f"{mbit:.1f}mbit", "burst", _BURST, "limit", _QUEUE]
    _run("tc", "qdisc", "replace", "dev", INTERFACE, "root", *rate)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LinkError(f"`{' '.join(command)}`: {done.stderr.strip()}")
