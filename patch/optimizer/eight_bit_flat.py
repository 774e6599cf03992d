"""Weights that are gathered in 8 bits (`--fp8-param-gather`).

A parameter whose attribute `gather_dtype` names an 8-bit type is in a domain of its own. Its flat buffer has
one byte a weight. A rank's own shards, which the optimizer updates, are bf16 weights in memory of their own.
After an update the ranks find the largest number of each weight together, each casts its shards, and the
casts travel. Rounding begins at the bf16 weight: the same bits as if the layer had rounded it, whatever ranks
share, and checkpoints hold exactly what trains.

A parameter has one of two forms. `whole`: bf16 in a second flat buffer, from the construction to the first
step, and while somebody reads or writes weights (`gather_whole`). Otherwise it is its 8-bit values, with the
attribute `scale_inv`, a float32 tensor of one number.

At `PARAMETERS` a unit is gathered so for each pass. Its scales are found as it is gathered first after an
update, or after weights were written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from patch.compat.torch_internals import foreach_norm, region
from patch.distributed.async_collectives import Pending, WaitClock, start_all_reduce
from patch.eight_bits import cast, scale_inv_of
from patch.errors import ConfigError
from patch.optimizer.domain import Domain, FlatLayout
from patch.optimizer.param_flat import ApartFlat
from patch.optimizer.sharded_flat import ShardedFlat


class _Round:
    """The scales of neighbouring parameters, on their way.

    Args:
        members: their places in the domain.
        bits: int32 (n,) the largest numbers, as bits: of numbers without sign they have the same order, and
            those of NaN come last.
        pending: the reduction of them.
    """

    def __init__(self, members: slice, bits: torch.Tensor, pending: Pending) -> None:
        self.members, self.bits, self.pending = members, bits, pending
        self.is_known = False


class RoundedFlat(ApartFlat):
    """The weights of a domain that has a `gathered_as`, and several shards, which travel in 8 bits."""

    def __init__(self, layout: FlatLayout, number: int, clock: WaitClock) -> None:
        super().__init__(layout, number, clock)
        assert self._domain.gathered_as is not None
        self._dtype = self._domain.gathered_as
        self._can_wait_elsewhere = self._like.is_cuda  # on another stream than the host or compute
        self._places = {index: place for place, index in enumerate(self._begins)}
        # cuBLAS takes no scale that does not begin at a multiple of 16 bytes.
        self._scale_inv = torch.ones(len(self._begins), 4, device=self._like.device)[:, 0]
        for parameter, scale_inv in zip(self.parameters, self._scale_inv, strict=True):
            parameter.scale_inv = scale_inv  # type: ignore[attr-defined]
            # Otherwise autograd would round gradients to 8 bits.
            parameter.grad_dtype = self._domain.dtype

    def _start_search(self, indices: Sequence[int], group: dist.ProcessGroup) -> _Round:
        """Start the search for the largest number of each weight in neighbouring buckets.

        Args:
            indices: of the buckets, which hold all parts of their weights, one weight at least.
            group: the ranks that share them.
        """
        found: dict[int, list[torch.Tensor]] = {}
        for index in indices:
            found |= {self._places[param.parameter]: [] for param in self._ranges[index].params}
        parts = [part for index in indices for part in self._own_parts(index)]
        for (place, _, _), norm in zip(parts, _largest([part for _, _, part in parts]), strict=True):
            found[place].append(norm)
        none = self._scale_inv.new_zeros(())  # where all of a weight is in other ranks' parts
        largest = [torch.stack(found[place]).amax() if found[place] else none for place in sorted(found)]
        bits = torch.stack(largest).view(torch.int32)
        pending = start_all_reduce(bits, group, dist.ReduceOp.MAX)
        return _Round(slice(min(found), max(found) + 1), bits, pending)

    def _finish(self, round_: _Round) -> None:
        if not round_.is_known:
            # A GPU's host does not wait here, and compute waits for the gather.
            round_.pending.wait(None if self._can_wait_elsewhere else self._clock)
            amax = round_.bits.view(torch.float32)
            self._scale_inv[round_.members].copy_(scale_inv_of(amax, self._dtype))
            round_.is_known = True

    def _round_own(self, index: int, own: torch.Tensor) -> None:
        """Write this rank's part of a bucket, whose scales are known, in 8 bits to its place `own`."""
        for place, first, values in self._own_parts(index):
            target = own[first : first + values.numel()].view(self._dtype)
            target.copy_(cast(values, self._scale_inv[place], self._dtype))

    def _own_parts(self, index: int) -> list[tuple[int, int, torch.Tensor]]:
        """The parameters in this rank's part of a bucket: place, where in it they begin, and values."""
        begin, end = self._domain.own(self._ranges[index])
        own = self.shard(index)
        return [
            (self._places[param.parameter], param.begin - begin, own[param.begin - begin : param.end - begin])
            for param in self._ranges[index].params_within(begin, end)
        ]


class EightBitFlat(RoundedFlat):
    """Parameters that are gathered in 8 bits after an update."""

    needs_preparation, form = True, "in 8 bits (--fp8-param-gather)"

    def __init__(self, layout: FlatLayout, number: int, clock: WaitClock) -> None:
        super().__init__(layout, number, clock)
        self.buffer = torch.zeros_like(self.buffer, dtype=torch.uint8)
        self._rounds: dict[int, _Round] = {}
        """By bucket: those of updates whose gathers are not started."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the 8-bit weights, and of this rank's shards."""
        return self.buffer.nbytes + self._own.nbytes

    # After an update.

    def prepare(self, indices: Sequence[int]) -> None:
        """Start the search for the largest number of each weight in these buckets, some of other domains.

        They are neighbours, and hold all parts of their weights.
        """
        indices = [index for index in indices if index in self._ranges]
        if any(self._ranges[index].params for index in indices):
            round_ = self._start_search(indices, self._domain.instance)
            self._rounds |= dict.fromkeys(indices, round_)

    def is_prepared(self, index: int) -> bool:
        """Whether the scales of the bucket are here, or compute waits for them alone."""
        return self._can_wait_elsewhere or index not in self._rounds or self._rounds[index].is_known

    def start_gather(self, index: int) -> Pending:
        """Round this rank's part of a bucket, and send it; on CUDA all of it on the current stream."""
        with region("bucket %d all-gather in 8 bits", index):
            if index in self._rounds:  # not a bucket of padding alone
                self._finish(self._rounds.pop(index))
                begin, end = self._domain.own(self._ranges[index])
                self._round_own(index, self.buffer[begin:end])
            return self._start_gather(self.buffer, index)

    @torch.no_grad()
    def leave_whole(self) -> None:
        """Round what weights hold now, the same on all ranks, and give up the memory in their own type."""
        if not self.is_whole:
            return
        self.store_whole()
        weights = [parameter.detach() for parameter in self.parameters]
        self._scale_inv.copy_(scale_inv_of(torch.stack(_largest(weights)), self._dtype))
        values = self.buffer.view(self._dtype)
        for (weight, place), scale_inv in zip(self._views(values), self._scale_inv, strict=True):
            place.copy_(cast(weight, scale_inv, self._dtype))
        self._whole = None
        self._point(values)


class EightBitUnits(ShardedFlat, RoundedFlat):
    """Parameters gathered in 8 bits by units, with places of one byte a weight; a visited unit has two."""

    def __init__(self, layout: FlatLayout, number: int, clock: WaitClock) -> None:
        self._scaled = set[int]()
        """The units whose scales are those of their shards."""
        super().__init__(layout, number, clock)

    def start_gather(self, index: int) -> None:
        """Take note that a bucket has been updated."""
        self._scaled.discard(self._ranges[index].unit)

    def start_unit(self, unit: int, *, is_visited: bool = False) -> list[Pending]:
        """Round this rank's part of a unit, and gather it; on CUDA all of it on the current stream."""
        buckets = [index for run in self._runs.get(unit, []) for index in run.buckets]
        if buckets and not is_visited and unit not in self._scaled:
            assert self._domain.gathers is not None
            self._finish(self._start_search(buckets, self._domain.gathers))
            self._scaled.add(unit)
        return super().start_unit(unit, is_visited=is_visited)

    def _sent(self, index: int, place: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a bucket, in 8 bits, written where it is gathered."""
        if place.dtype != torch.uint8:
            return super()._sent(index, place)
        self._round_own(index, place)
        return place

    def store_whole(self) -> None:
        """Keep what whole parameters hold now, the same on all ranks."""
        self._scaled.clear()
        super().store_whole()

    def end_description(self) -> None:
        """Whoever read parameters may have loaded them."""
        self._scaled.clear()
        super().end_description()


def check_gathers(domains: Sequence[Domain], *, is_offloading: bool) -> None:
    """Refuse weights that are gathered in 8 bits of which this rank's shards are not ready when that begins.

    Args:
        domains: all of this rank's.
        is_offloading: whether optimizer states may go to the host.
    Raises:
        ConfigError: their states may go to the host, or they have masters beside them (fp16).
    """
    rounded = [domain for domain in domains if domain.gathered_as is not None]
    if rounded and is_offloading:
        raise ConfigError(
            "got weights that are gathered in 8 bits, expected none (--fp8-param-gather): their scales "
            "are found when the device has updated them, and the host updates later",
            field="optimizer_offload_policy",
        )
    if any(domain.dtype == torch.float16 for domain in rounded):
        raise ConfigError("got float16 weights that are gathered in 8 bits, expected bfloat16 or float32")


def _largest(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """The largest absolute number of each tensor, NaN if it has one; float32."""
    return list(foreach_norm(parts, math.inf, dtype=torch.float32)) if parts else []
