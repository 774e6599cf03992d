"""A pool of ordinary memory that keeps account of what is done with it, and insists on NCCL's order."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


class _Allocations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, int] = {}
        """Bytes of each, by its address."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.storages[found.untyped_storage().data_ptr()] = found.untyped_storage().nbytes()
        return found


class RecordingPool:
    """Says what was done, in order, with the ranks of each group."""

    def __init__(self) -> None:
        self.events: list[tuple[str, list[int]]] = []
        self.storages: dict[int, int] = {}
        """Bytes of everything that was allocated, by its address, in order."""

    def _note(self, what: str, group: dist.ProcessGroup | None = None) -> None:
        self.events.append((what, [] if group is None else dist.get_process_group_ranks(group)))

    def _past(self, what: str, group: dist.ProcessGroup) -> int:
        return self.events.count((what, dist.get_process_group_ranks(group)))

    @contextmanager
    def allocating(self) -> Iterator[None]:
        assert {what for what, _ in self.events} <= {"allocate"}
        self._note("allocate")
        with _Allocations() as allocations:
            yield
        self.storages |= allocations.storages

    @property
    def num_bytes(self) -> int:
        """Of everything that was allocated."""
        return sum(self.storages.values())

    def place_of(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Which of its allocations a tensor lies in, and the offset in bytes there."""
        address = tensor.untyped_storage().data_ptr()
        return list(self.storages).index(address), tensor.data_ptr() - address

    def meet(self, group: dist.ProcessGroup) -> None:
        dist.all_reduce(torch.zeros(1), group=group)  # ends only if all ranks of the group come
        self._note("meet", group)

    def register(self, group: dist.ProcessGroup) -> None:
        assert self.num_bytes and self._past("meet", group) and not self._past("register", group)
        self._note("register", group)

    def deregister(self, group: dist.ProcessGroup) -> None:
        assert self._past("register", group) == self._past("deregister", group) + 1
        self._note("deregister", group)

    def free(self) -> None:
        done = [what for what, _ in self.events]
        assert done.count("register") == done.count("deregister") and "free" not in done
        self._note("free")
