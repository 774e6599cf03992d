"""Make messages between processes wrong, one kind at a time: sums, scales, shards.

    with Messages() as messages: ...            # records the messages of steps and their callers
    with Messages(Fault(site, "doubled")): ...

A site is a collective and the function that calls it within a step. Only the last rank of a group
makes a collective wrong. With "skipped" all ranks skip it.
"""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers, mappings

from patch.distributed import async_collectives

KINDS = {"sum": ("doubled", "skipped"), "other": ("missing", "swapped")}
UPSTREAMS = ("all_gather", "reduce_scatter")
PLACES = [
    (dist, "all_reduce"), (dist, "all_to_all_single"), (dist, "isend"), (dist.distributed_c10d, "isend"),
    (async_collectives, "_reduce_scatter"), (async_collectives, "_all_gather"),
    *((each, f"dist_{name}_func") for each in (layers, mappings) for name in UPSTREAMS),
]  # fmt: skip
"""Functions that send all data of a step, in the modules where they are looked up."""
INPUT = {"all_reduce": 0, "isend": 0}
"""Function -> index of its input argument. It is 1 for all others, after the output."""
PASSED_ON = ("async_collectives", "tensor_group", "context_group", "collectives", "wrong_messages")


class Fault(NamedTuple):
    site: str
    kind: str


class Messages:
    """Context that records the messages of steps, and makes those of a fault wrong."""

    def __init__(self, fault: Fault | None = None) -> None:
        self.fault, self.sites, self._stack = fault, set[Fault](), ExitStack()

    def __enter__(self) -> "Messages":
        wrapped = {own: self._wrapped(own) for own in (getattr(*place) for place in PLACES)}
        for place in PLACES:  # torch compares its own isend with the given function
            self._stack.enter_context(mock.patch.object(*place, wrapped[getattr(*place)]))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _wrapped(self, function: Any) -> Any:
        name = function.__name__

        def call(*args: Any, **named: Any) -> Any:
            at, site = INPUT.get(name, 1), _site(name)
            given = args[at] if len(args) > at else named.get("tensor")
            if site is None or not _matters(given, args, named):
                return function(*args, **named)
            kinds = KINDS["sum" if name == "all_reduce" else "other"]
            self.sites |= {Fault(site, kind) for kind in kinds}
            if self.fault is None or self.fault.site != site:
                return function(*args, **named)
            if self.fault.kind == "skipped":
                return _Nothing() if named.get("async_op") else None
            group = named.get("group") or dist.group.WORLD
            if name == "isend" or dist.get_rank(group) == group.size() - 1:
                wrong = _wrong(given, self.fault.kind)
                if name == "all_reduce":
                    given.copy_(wrong)
                else:
                    _alive.append(wrong)
                    if len(args) > at:
                        args = (*args[:at], wrong, *args[at + 1 :])
                    else:
                        named["tensor"] = wrong
            return function(*args, **named)

        return call


_alive: list[torch.Tensor] = []
"""Buffers that gloo sends must live until the message has arrived."""


class _Nothing(dist.Work):
    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _wrong(given: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "doubled":
        return given.detach() * 2
    if kind == "missing":
        return torch.zeros_like(given)
    return given.detach().flatten().roll(max(given.numel() // 2, 1)).view(given.shape)


def _matters(given: torch.Tensor | None, args: tuple, named: dict) -> bool:
    """Exclude groups of one rank, maxima, which only keep exponents small, and flags."""
    if given is None or (named.get("group") or dist.group.WORLD).size() == 1:
        return False
    operations = [named.get("op"), *(each for each in args if not isinstance(each, torch.Tensor))]
    return dist.ReduceOp.MAX not in operations and given.numel() > 8


def _site(name: str) -> str | None:
    """Return the collective and its caller, or None outside of training steps."""
    frame, caller, is_step = sys._getframe(2), "", False
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        is_ours = "patch" in file.parts or "megatron" in file.parts
        if is_ours and not caller and file.stem not in PASSED_ON:
            caller = f"{name} {file.stem}.{frame.f_code.co_name}"
        if frame.f_code.co_name in ("train_step", "backward") or "autograd" in file.parts:
            is_step = True
        if file.stem in ("evaluation", "saving", "worker"):
            break
        frame = frame.f_back  # type: ignore[assignment]
    return caller if caller and is_step else None
