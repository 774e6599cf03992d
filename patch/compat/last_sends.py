"""Messages of a forward-only interleaved schedule that the sender does not wait for.

megatron-core 0.16.1, pipeline_parallel/schedules.py:1499-1518: with `overlap_p2p_comm_warmup_flush` a send is
waited for after the next one, and the last send of a rank never. In training, gradients come back only after
it has arrived. An evaluation just returns, and gloo takes back a message whose handle is gone: the receiver
waits for ever.

To delete when upstream waits for the last send at the end of the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.pipeline_parallel import p2p_communication


@contextmanager
def last_sends_arrive() -> Iterator[None]:
    """A context whose end waits for the last message that was sent to each neighbour within it."""
    send_and_receive = p2p_communication._p2p_ops
    last: dict[str, Any] = {}

    def noted(**arguments: Any) -> dict[str, Any]:
        requests = send_and_receive(**arguments)
        last.update({name: request for name, request in requests.items() if name.startswith("send")})
        return requests

    p2p_communication._p2p_ops = noted
    try:
        yield
    finally:
        p2p_communication._p2p_ops = send_and_receive
    for request in last.values():
        if not request.is_completed():  # gloo can wait for a message once only
            request.wait()
