"""Interfaces, and which of them gloo and NCCL would take between machines."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from toolkits.doctor.check import Finding, Settings, graded

_NET, _INFINIBAND = Path("/sys/class/net"), Path("/sys/class/infiniband")
_LOOPBACK = "127."


def check_network(settings: Settings) -> Iterator[Finding]:
    """Addresses are not reported, only kinds and the names of interfaces."""
    import psutil

    states = psutil.net_if_stats()
    up = {name: state.speed for name, state in states.items() if state.isup and name != "lo"}
    shown = [f"{name}{f' ({speed / 1e3:g} Gbit/s)' if speed else ''}" for name, speed in up.items()]
    yield Finding("interfaces", "ok", ", ".join(shown) or "none but lo", data={"mbit_per_s": up})
    addresses = {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
    }
    yield own_name(_own_addresses(), addresses)
    yield from interface_variables(os.environ, list(states))
    yield from _infiniband()


def own_name(resolved: Sequence[str], addresses: Mapping[str, Sequence[str]]) -> Finding:
    """Whether other machines reach this one at the address that its own name has: gloo announces that one.

    Args:
        resolved: the addresses of this machine's name.
        addresses: the addresses of each interface.
    """
    cure = "only for several machines: set GLOO_SOCKET_IFNAME to the interface that they share"
    if not resolved:
        return Finding("this machine's name", "warning", "has no address: gloo takes the loopback", cure)
    if all(address.startswith(_LOOPBACK) for address in resolved):
        return Finding("this machine's name", "warning", "is a loopback address (127.x)", cure)
    owners = sorted(name for name, own in addresses.items() if set(own) & set(resolved))
    if not owners:
        what = "has an address that no interface has"
        return Finding("this machine's name", "warning", what, cure)
    what = f"gloo takes {', '.join(owners)}"
    return Finding("this machine's name", "ok", what, data={"interfaces": owners})


def interface_variables(environ: Mapping[str, str], interfaces: Sequence[str]) -> Iterable[Finding]:
    """Interfaces that variables name, but that are not here.

    Args:
        environ: the environment.
        interfaces: the names of those that are here.
    """
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        # NCCL: "^" excludes, "=" is exact; otherwise beginnings of names.
        value = environ.get(variable, "")
        names = [name for name in value.removeprefix("=").split(",") if name]
        is_exact = value.startswith("=") or variable.startswith("GLOO")
        known = [n for n in names if any(i == n or (not is_exact and i.startswith(n)) for i in interfaces)]
        if names and not value.startswith("^") and not known:
            cure = f"unset {variable}, or name one of {', '.join(interfaces)}"
            yield Finding(variable, "broken", f"{value} is no interface here", cure)


def _own_addresses() -> list[str]:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
    except OSError:
        return []
    return sorted({str(entry[4][0]) for entry in found})


def _infiniband() -> Iterator[Finding]:
    ports = sorted(_INFINIBAND.glob("*/ports/*/state"))
    if not ports:
        return
    states = {f"{port.parts[-4]}:{port.parts[-2]}": port.read_text().split(":")[-1].strip() for port in ports}
    down = [name for name, state in states.items() if state != "ACTIVE"]
    what = f"{len(states) - len(down)} of {len(states)} ports active"
    cure = f"look at cables and the subnet manager: {', '.join(down)}"
    yield graded("InfiniBand", what, bool(down), cure, ports=states)
