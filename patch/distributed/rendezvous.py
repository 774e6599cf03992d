"""Meetings of the launchers of all machines: torch's c10d rendezvous, with three decisions of our own.

- Ranks follow the machines' indices. torch sorts machines by address and process id, so they would change
  places at a restart, and with them the order of sums.
- The workers of every round meet in the store of the first machine's launcher, under names of their own: no
  other port has to be free or open, and no store dies with a worker. torch would keep the workers' store on
  the machine that had rank 0 first.
- If the machines that are there are too many for the layout and the global batch, the last ones wait as
  spares until the others meet again. (For each machine in its own waiting list torch restarts the round.)
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from datetime import timedelta

from torch.distributed.elastic import rendezvous as elastic
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend

from patch.distributed.job import ROUND, answer_within, unreachable
from patch.logger import get_logger
from patch.preflight.cluster import Rendezvous

_logger = get_logger(__name__)

LAST_CALL_S = 30
"""Seconds that machines wait for the others when fewer than all, but enough, have come."""
HEARTBEAT_S = 5
"""A machine that has not been heard of for three times as long is lost."""
LINGER_S = 3.0
"""Seconds that the first machine keeps the store after the end, from which the others learn of the end."""


class Meeting(dynamic.DynamicRendezvousHandler):
    """The meetings of one machine's launcher with the others': one at the start and one at each restart."""

    place: Rendezvous
    """This machine's index, and the address of the first machine, whose launcher keeps the store."""
    sizes: Collection[int]
    """The numbers of machines that the layout and the global batch allow."""
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
        address, limits = (
            f"{place.master_addr}:{place.master_port}", (min(sizes), max(sizes) + place.num_spares)
        )  # fmt: skip
        seconds = int(timeout.total_seconds())
        parameters = elastic.RendezvousParameters(
            "c10d", address, "patch", *limits, is_host=not place.node_rank, read_timeout=seconds
        )
        try:
            backend, store = answer_within(timeout, lambda: create_backend(parameters))
        except (elastic.RendezvousError, TimeoutError) as error:
            raise unreachable(f"machine {place.node_rank}", address, error.__cause__ or error) from error
        waits = dynamic.RendezvousTimeout(join=timeout, last_call=timedelta(seconds=LAST_CALL_S))
        name = f"{place.node_rank:06d}"  # torch sorts by it, and does not connect to it
        meeting = cls.from_backend("patch", store, backend, *limits, name, waits, HEARTBEAT_S)
        meeting.place, meeting.sizes = place, sizes
        # Otherwise torch would make another store for the workers.
        meeting._shared_tcp_store_server = store
        port = store.port  # type: ignore[attr-defined]  # of a TCPStore, torch's default
        meeting._bootstrap_store_info = elastic.RendezvousStoreInfo(place.master_addr, port)
        return meeting

    def next_rendezvous(self) -> elastic.RendezvousInfo:
        """Meet the others; returns when this machine takes part in a round. See the base class."""
        while True:
            info = super().next_rendezvous()
            size = max(size for size in self.sizes if size <= info.world_size)
            if info.rank < size:
                break
            said = "%d of %d machines train; this one waits until another is lost"
            _logger.info(said, size, info.world_size)
            self.is_spare = True
            self._wait_as_spare()
            self.is_spare = False
        os.environ[ROUND] = str(self._state_holder.state.round + 1)  # the workers inherit it
        return elastic.RendezvousInfo(info.store, info.rank, size, info.bootstrap_store_info)  # type: ignore[arg-type]

    def _wait_as_spare(self) -> None:
        """Wait until the others meet again.

        Raises:
            RendezvousGracefulExitError: the job has ended.
        """
        try:
            while not self.num_nodes_waiting():
                if self.is_closed():
                    raise elastic.RendezvousGracefulExitError("the job has ended")
                time.sleep(1.0)
        except elastic.RendezvousConnectionError as error:
            raise elastic.RendezvousGracefulExitError("the job has ended") from error

    def leave(self, *, closes: bool) -> None:
        """Leave the job; if that is asked and this machine is no spare, close it for all machines."""
        if closes and not self.is_spare:
            self.shutdown()
        if self.place.node_rank == 0 and max(self.sizes) + self.place.num_spares > 1:
            time.sleep(LINGER_S)
