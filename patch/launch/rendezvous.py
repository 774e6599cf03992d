"""The rendezvous of the launchers of all machines: torch's c10d rendezvous with three changes.

- Ranks follow the machines' indices. torch sorts machines by address and process id, so machines would swap
  ranks at a restart, and sums would change their order.
- The workers of every round use the store of machine 0's launcher, with a name prefix per round. So no
  other port has to be free or open, and no store dies with a worker. torch would keep the workers' store on
  the machine that first had rank 0.
- If there are more machines than layout and global batch allow, the last machines wait as spares. torch would
  restart the round for each machine in its waiting list.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from datetime import timedelta

from torch.distributed.elastic import rendezvous as elastic
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend

from patch.launch.job import ROUND, connect
from patch.logger import get_logger
from patch.preflight.cluster import Rendezvous

_logger = get_logger(__name__)

LAST_CALL_S = 30
"""Seconds that machines wait for further machines when enough, but not all, have joined."""
HEARTBEAT_S = 5
"""Seconds between heartbeats; a machine is lost after three missing heartbeats."""
LINGER_S = 3.0
"""Seconds that machine 0 keeps the store after the end, so that other machines learn of the end."""


class RendezvousHandler(dynamic.DynamicRendezvousHandler):
    """The rendezvous of a machine's launcher: one round at the start and one at each restart."""

    place: Rendezvous
    """This machine's index, and the address of machine 0, whose launcher keeps the store."""
    sizes: Collection[int]
    """The numbers of machines that the layout and the global batch allow."""
    is_spare = False
    """Whether this machine is a spare, which waits until a training machine is lost."""

    @classmethod
    def join(cls, place: Rendezvous, sizes: Collection[int], timeout: timedelta) -> RendezvousHandler:
        """Connect to machine 0's launcher; on machine 0, open its port.

        `timeout` is the time limit for the other machines.

        Raises:
            TrainingError: machine 0's launcher does not answer at its address.
        """
        address = f"{place.master_addr}:{place.master_port}"
        limits = min(sizes), max(sizes) + place.num_spares
        seconds = int(timeout.total_seconds())
        parameters = elastic.RendezvousParameters(
            "c10d", address, "patch", *limits, is_host=not place.node_rank, read_timeout=seconds
        )
        who = f"machine {place.node_rank}"
        backend, store = connect(who, address, timeout, lambda: create_backend(parameters))
        waits = dynamic.RendezvousTimeout(join=timeout, last_call=timedelta(seconds=LAST_CALL_S))
        name = f"{place.node_rank:06d}"  # torch only sorts by this name
        meeting = cls.from_backend("patch", store, backend, *limits, name, waits, HEARTBEAT_S)
        meeting.place, meeting.sizes = place, sizes
        # Otherwise torch would create another store for the workers.
        meeting._shared_tcp_store_server = store
        port = store.port  # type: ignore[attr-defined]  # of a TCPStore, torch's default
        meeting._bootstrap_store_info = elastic.RendezvousStoreInfo(place.master_addr, port)
        return meeting

    def next_rendezvous(self) -> elastic.RendezvousInfo:
        """Join rounds until this machine takes part in one; see the base class.

        Raises:
            RendezvousGracefulExitError: the job ended while this machine was a spare.
        """
        try:
            info = super().next_rendezvous()
            while info.rank >= (size := max(size for size in self.sizes if size <= info.world_size)):
                said = "%d of %d machines train; this spare waits until a training machine is lost"
                _logger.info(said, size, info.world_size)
                self.is_spare = True
                self._wait_as_spare()
                info = super().next_rendezvous()
        except (elastic.RendezvousClosedError, elastic.RendezvousConnectionError) as error:
            if self.is_spare:  # a round can also end before a spare has joined it
                raise elastic.RendezvousGracefulExitError("the job has ended") from error
            raise
        self.is_spare = False
        os.environ[ROUND] = str(self._state_holder.state.round + 1)  # the workers inherit it
        return elastic.RendezvousInfo(info.store, info.rank, size, info.bootstrap_store_info)  # type: ignore[arg-type]

    def _wait_as_spare(self) -> None:
        """Wait for the next round; raise RendezvousClosedError if the job has ended."""
        while not self.num_nodes_waiting():
            if self.is_closed():
                raise elastic.RendezvousClosedError
            time.sleep(1.0)

    def leave(self, *, closes: bool) -> None:
        """Leave the job; if `closes` is set and this machine is no spare, close the job for all machines."""
        if closes and not self.is_spare:
            self.shutdown()
        if self.place.node_rank == 0 and max(self.sizes) + self.place.num_spares > 1:
            time.sleep(LINGER_S)
