"""Meetings of the launchers of all machines: torch's c10d rendezvous, with three decisions of our own.

- Ranks follow the machines' indices. torch sorts machines by address and process id, so they would change
  places at a restart, and with them the order of sums.
- The workers of every round meet in the store of the first machine's launcher, under names of their own: no
  other port has to be free or open, and no store dies with a worker. torch would keep the workers' store on
  the machine that had rank 0 first.
- If the machines that are there are too many for the layout and the global batch, the last ones wait as
  spares until the others meet again.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import timedelta

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from patch.device import start_thread
from patch.distributed.job import ROUND, answer_within, await_address, unreachable
from patch.logger import get_logger
from patch.preflight.cluster import Rendezvous

_logger = get_logger(__name__)

LAST_CALL_S = 30
"""Seconds that machines wait for the others when fewer than all, but enough, have come."""
HEARTBEAT_S = 5
"""A machine that has not been heard of for three times as long is lost."""
LINGER_S = 3.0
"""Seconds that the first machine keeps the store after the end, from which the others learn of the end."""
_POLL_S = 1.0
_SILENCE_S = 5.0
"""A launcher that has given no sign for so long is lost: each gives one a second."""


class Meeting(DynamicRendezvousHandler):
    """The meetings of one machine's launcher with the others': one at the start and one at each restart."""

    place: Rendezvous
    """This machine's index, and the address of the first machine, whose launcher keeps the store."""
    sizes: list[int]
    """The numbers of machines that the layout and the global batch allow, in ascending order."""
    store: TCPStore
    members: Sequence[int] = ()
    """The indices of the machines of this round, which is known when it has begun."""
    is_over: threading.Event
    """Set when this machine has left."""
    is_spare = False
    """Whether this machine waits until another is lost; the others go on without it."""

    @classmethod
    def join(cls, place: Rendezvous, sizes: Collection[int], timeout: timedelta) -> Meeting:
        """Connect to the first machine's launcher; on the first machine open its port.

        Args:
            place: this machine's index, and the address of the first machine.
            sizes: the numbers of machines that the layout and the global batch allow.
            timeout: how long to wait for the others.

        Raises:
            TrainingError: no launcher of the first machine answers at its address.
        """
        # torch would keep another store for the workers, and each machine the address of the first round's.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        low, high = min(sizes), max(sizes) + place.num_spares
        address = f"{place.master_addr}:{place.master_port}"
        is_first, seconds = place.node_rank == 0, int(timeout.total_seconds())
        parameters = RendezvousParameters(
            "c10d", address, "patch", low, high, is_host=is_first, read_timeout=seconds
        )
        try:
            await_address(place.master_addr)
            backend, store = answer_within(timeout, lambda: create_backend(parameters))
        except (RendezvousError, TimeoutError) as error:
            who = f"machine {place.node_rank}"
            raise unreachable(who, address, error.__cause__ or error, "the launcher of machine 0") from error
        assert isinstance(store, TCPStore), "the default of torch's parameters"
        meeting = cls.from_backend(
            parameters.run_id,
            store,
            backend,
            low,
            high,
            local_addr=f"{place.node_rank:06d}",  # torch sorts by it, and does not connect to it
            timeout=RendezvousTimeout(join=timeout, last_call=timedelta(seconds=LAST_CALL_S)),
            keep_alive_interval=HEARTBEAT_S,
        )
        meeting.place, meeting.sizes, meeting.store = place, sorted(sizes), store
        meeting.is_over = threading.Event()
        if high > 1:
            start_thread("sign of life", meeting._give_signs)
        return meeting

    def _give_signs(self) -> None:
        """Let the others know that this machine is there, as long as there is a store."""
        with suppress(RuntimeError):  # the store's errors
            store = self.store.clone()  # type: ignore[attr-defined]  # one that no other thread waits with
            store.set(f"name of machine {self.place.node_rank}", socket.gethostname())
            while not self.is_over.wait(_POLL_S):
                store.add(f"signs of machine {self.place.node_rank}", 1)

    def lost_machines(self) -> list[str]:
        """The other machines of this round that give no sign of life; waits for it."""
        others = [rank for rank in self.members if rank != self.place.node_rank]
        if not others:
            return []
        try:
            before = [self.store.add(f"signs of machine {rank}", 0) for rank in others]
            time.sleep(_SILENCE_S)
            now = [self.store.add(f"signs of machine {rank}", 0) for rank in others]
            silent = [rank for rank, *counts in zip(others, before, now, strict=True) if len({*counts}) == 1]
            names = [self.store.get(f"name of machine {rank}").decode() for rank in silent]
        except RuntimeError:  # the store is the first machine's
            return [f"machine 0 ({self.place.master_addr})"]
        return [f"machine {rank} ({name})" for rank, name in zip(silent, names, strict=True)]

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the others; returns when this machine takes part in a round. See the base class."""
        while True:
            info = super().next_rendezvous()
            size = max(size for size in self.sizes if size <= info.world_size)
            if info.rank < size:
                break
            self.is_spare = True
            self._wait_as_spare(size, info.world_size)
            self.is_spare = False
        if info.rank == 0:
            info.store.set(ROUND, str(self.store.add(ROUND, 1)))
        number = os.environ[ROUND] = info.store.get(ROUND).decode()  # the workers inherit it
        info.store.set(f"round {number}, {info.rank}", str(self.place.node_rank))
        self.members = [int(info.store.get(f"round {number}, {rank}")) for rank in range(size)]
        workers = RendezvousStoreInfo(self.place.master_addr, self.store.port)
        return RendezvousInfo(info.store, info.rank, size, workers)

    def _wait_as_spare(self, size: int, present: int) -> None:
        """Wait until the others meet again.

        Raises:
            RendezvousGracefulExitError: the job has ended.
        """
        _logger.info("%d of %d machines train; this one waits until another is lost", size, present)
        try:
            while not self.num_nodes_waiting():
                if self.is_closed():
                    raise RendezvousGracefulExitError("the job has ended")
                time.sleep(_POLL_S)
        except RendezvousConnectionError as error:
            raise RendezvousGracefulExitError("the job has ended") from error

    @property
    def use_agent_store(self) -> bool:
        """Whether workers meet in the launchers' store: yes."""
        return True

    def shutdown(self) -> bool:
        """Close the job for all machines."""
        self.is_over.set()
        closed = super().shutdown()
        if self.place.node_rank == 0 and self.sizes[-1] + self.place.num_spares > 1:
            time.sleep(LINGER_S)
        return closed
