"""Where the launchers of all machines meet: torch's c10d rendezvous, with three decisions of our own.

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
import time
from collections.abc import Collection
from datetime import timedelta

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from patch.config import Rendezvous
from patch.distributed.job import ROUND, answer_within
from patch.errors import TrainingError
from patch.logger import get_logger

_logger = get_logger(__name__)

LAST_CALL_S = 30
"""How long machines wait for the others when fewer than all, but enough, have come."""
HEARTBEAT_S = 5
"""A machine that has not been heard of for three times as long is lost."""
LINGER_S = 3.0
"""How long the first machine keeps the store after the end, so that the others learn of the end from it."""
_POLL_S = 1.0
_RUN_ID = "patch"


class Meeting(RendezvousHandler):
    """The meetings of one machine's launcher with those of the others: one at the start and at each restart.

    Args:
        place: this machine's index, and the address of the first machine, whose launcher keeps the store.
        sizes: the numbers of machines that the layout and the global batch allow.
        timeout: how long to wait for the others.

    Raises:
        TrainingError: no launcher of the first machine answers at its address.
    """

    def __init__(self, place: Rendezvous, sizes: Collection[int], timeout: timedelta) -> None:
        self._place, self._sizes = place, sorted(sizes)
        # torch would keep another store for the workers, and each machine the address of the first round's.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        parameters = RendezvousParameters(
            backend="c10d",
            endpoint=f"{place.master_addr}:{place.master_port}",
            run_id=_RUN_ID,
            min_nodes=self._sizes[0],
            max_nodes=self._sizes[-1],
            local_addr=f"{place.node_rank:06d}",  # torch sorts by it, and does not connect to it
            is_host=place.node_rank == 0,
            join_timeout=int(timeout.total_seconds()),
            read_timeout=int(timeout.total_seconds()),
            last_call_timeout=LAST_CALL_S,
            keep_alive_interval=HEARTBEAT_S,
        )
        try:
            backend, self._store = answer_within(timeout, lambda: create_backend(parameters))
        except (RendezvousError, TimeoutError) as error:
            reason = str(error.__cause__ or error).strip().partition("\n")[0]
            raise TrainingError(
                f"machine {place.node_rank} could not join the job at {parameters.endpoint} "
                f"(MASTER_ADDR:MASTER_PORT): {reason}. Expected the launcher of machine 0 there: give that "
                "machine's address and a port that no other program uses; --distributed-timeout-minutes is "
                "how long machines wait for each other"
            ) from error
        self._torch = create_handler(self._store, backend, parameters)

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the others; returns when this machine takes part in a round. See the base class."""
        while True:
            info = self._torch.next_rendezvous()
            size = max(size for size in self._sizes if size <= info.world_size)
            if info.rank < size:
                break
            self._wait_as_spare(size, info.world_size)
        if info.rank == 0:
            info.store.set(ROUND, str(self._store.add(ROUND, 1)))
        os.environ[ROUND] = info.store.get(ROUND).decode()  # the workers inherit it
        assert isinstance(self._store, TCPStore), "the default of torch's parameters"
        place = RendezvousStoreInfo(self._place.master_addr, self._store.port)
        return RendezvousInfo(info.store, info.rank, size, place)

    def _wait_as_spare(self, size: int, present: int) -> None:
        """Wait until the others meet again.

        Raises:
            RendezvousGracefulExitError: the job has ended.
        """
        _logger.info("%d of %d machines train; this one waits until another is lost", size, present)
        try:
            while not self._torch.num_nodes_waiting():
                if self._torch.is_closed():
                    raise RendezvousGracefulExitError("the job has ended")
                time.sleep(_POLL_S)
        except RendezvousConnectionError as error:
            raise RendezvousGracefulExitError("the job has ended") from error

    @property
    def use_agent_store(self) -> bool:
        """Whether workers meet in the launchers' store: yes."""
        return True

    def get_backend(self) -> str:
        """See the base class."""
        return self._torch.get_backend()

    def is_closed(self) -> bool:
        """See the base class."""
        return self._torch.is_closed()

    def set_closed(self) -> None:
        """See the base class."""
        self._torch.set_closed()

    def num_nodes_waiting(self) -> int:
        """See the base class."""
        return self._torch.num_nodes_waiting()

    def get_run_id(self) -> str:
        """See the base class."""
        return self._torch.get_run_id()

    def shutdown(self) -> bool:
        """Close the job for all machines."""
        closed = self._torch.shutdown()
        if self._place.node_rank == 0 and self._sizes[-1] > 1:
            time.sleep(LINGER_S)
        return closed
