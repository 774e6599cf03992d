"""Reduce-scatters over NCCL that send rounded gradients and add them up in fp32 (--grad-reduce-in-bf16)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from patch.device import stream_of, streams_of
from patch.distributed.async_collectives import (
    Pending,
    in_fp32,
    queued_on,
    start_all_to_all,
    sum_in_fp32,
)


class RoundedSums:
    """What `start_reduce_scatter` does over gloo for gradients that travel in fewer bits, beside compute.

    All messages are rounded, exchanged and summed on one stream, one after the other. So one buffer to send
    from and one to receive in do for all, however far the host is ahead.

    Args:
        numel: of the largest buffer.
        travels_as: to which gradients are rounded.
        device: of the gradients.
    """

    def __init__(self, numel: int, travels_as: torch.dtype, device: torch.device) -> None:
        self._sent = torch.empty(numel, dtype=travels_as, device=device)
        self._received = torch.empty_like(self._sent)
        self._device, self._streams = device, streams_of(device)
        self._aside = stream_of(device, "rounded sums")
        self._aside.wait_stream(self._streams.current_stream())

    @property
    def num_bytes(self) -> int:
        """Bytes of both buffers."""
        return self._sent.nbytes + self._received.nbytes

    def start(self, buffer: torch.Tensor, out: torch.Tensor, group: dist.ProcessGroup) -> Pending:
        """Sum `buffer` over the group and write this rank's shard of the sum to `out`.

        Args:
            buffer: (group size * n,), of at most `numel` elements; not changed, unless `out` is a part of it.
            out: (n,), this rank's part of `buffer`, or other memory.
            group: the ranks that take part.
        """
        self._aside.wait_stream(self._streams.current_stream())
        sent, received = self._sent[: buffer.numel()], self._received[: buffer.numel()]
        with self._streams.stream(self._aside):
            total = in_fp32(out)  # before the message: a rank that runs out of memory has sent nothing
            sent.copy_(buffer)
            start_all_to_all(received, sent, group).wait()
            sum_in_fp32(received.chunk(group.size()), total, out)
            return queued_on(self._aside, self._device)
