"""Weights that are gathered in 8 bits (`--fp8-param-gather`).

A parameter whose attribute `gather_dtype` names an 8-bit type is in a domain of its own. Its flat buffer has
one byte a weight. A rank's own shards, which the optimizer updates, are bf16 weights in memory of their own.
After an update the ranks find the largest number of each weight together, each casts its shards, and the
casts travel. Rounding begins at the bf16 weight: the same bits as if the layer had rounded it, whatever ranks
share, and checkpoints hold exactly what trains.

A parameter has one of two forms. `whole`: bf16 in a second flat buffer, from the construction to the first
step, and while somebody reads or writes weights (`gather_whole`). Otherwise it is its 8-bit values, with the
attribute `scale_inv`, a float32 tensor of one number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch.autograd.graph import increment_version

from patch.compat.torch_internals import foreach_norm
from patch.distributed.async_collectives import Pending, WaitClock, start_all_gather, start_all_reduce
from patch.distributed.collectives import all_or_none
from patch.eight_bits import cast, scale_inv_of
from patch.errors import ConfigError, TrainingError
from patch.layout.buckets import BucketRange
from patch.optimizer.domain import Domain
from patch.optimizer.trained import TrainedParameters


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


class EightBitFlat:
    """The weights of one domain.

    Args:
        parameters: the trainable ones; buckets refer to them by index.
        bucket_ranges: the buckets of the domain, by their index.
        domain: it has a `gathered_as`, and several shards.
        values: uint8 (numel,) gets the 8-bit numbers.
        whole: (numel,) the weights in their own type; the parameters are views of it.
        clock: gets the time that this thread waits for other ranks.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        bucket_ranges: Mapping[int, BucketRange],
        domain: Domain,
        values: torch.Tensor,
        whole: torch.Tensor,
        clock: WaitClock,
    ) -> None:
        assert domain.gathered_as is not None
        self._ranges, self._domain, self._dtype = bucket_ranges, domain, domain.gathered_as
        self._values, self._clock = values, clock
        self._can_wait_elsewhere = values.is_cuda  # on another stream than the host or compute
        self._whole: torch.Tensor | None = whole
        self.own = whole.new_zeros(whole.numel() // domain.num_shards)
        """This rank's shards, before they are rounded."""
        begins = {
            param.parameter: param.begin
            for bucket_range in bucket_ranges.values()
            for param in bucket_range.params
            if param.offset == 0
        }
        self._members = [(parameters[index], begin) for index, begin in begins.items()]
        """The parameters in the order of buckets, and where each begins."""
        self._places = {index: place for place, index in enumerate(begins)}
        # cuBLAS takes no scale that does not begin at a multiple of 16 bytes.
        self._scale_inv = torch.ones(len(begins), 4, device=whole.device)[:, 0]
        self._rounds: dict[int, _Round] = {}
        """By bucket: those of updates whose gathers are not started."""

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """In the order of buckets."""
        return [parameter for parameter, _ in self._members]

    @property
    def is_whole(self) -> bool:
        """Whether parameters are in their own type."""
        return self._whole is not None

    def shard(self, index: int) -> torch.Tensor:
        """(n,) this rank's part of a bucket, before it is rounded; written by the optimizer."""
        begin, end = self._ranges[index].begin, self._ranges[index].end
        return self.own[begin // self._domain.num_shards : end // self._domain.num_shards]

    # After an update.

    def start_scales(self, indices: Sequence[int]) -> None:
        """Start the search for the largest number of each weight in these buckets.

        They are neighbours, and hold all parts of their weights.
        """
        found: dict[int, list[torch.Tensor]] = {}
        for index in indices:
            found |= {self._places[param.parameter]: [] for param in self._ranges[index].params}
        if not found:
            return
        parts = [part for index in indices for part in self._own_parts(index)]
        for (place, _, _), norm in zip(parts, _largest([part for _, _, part in parts]), strict=True):
            found[place].append(norm)
        none = self._scale_inv.new_zeros(())  # where all of a weight is in other ranks' parts
        largest = [torch.stack(found[place]).amax() if found[place] else none for place in sorted(found)]
        bits = torch.stack(largest).view(torch.int32)
        pending = start_all_reduce(bits, self._domain.instance, torch.distributed.ReduceOp.MAX)
        round_ = _Round(slice(min(found), max(found) + 1), bits, pending)
        self._rounds |= dict.fromkeys(indices, round_)

    def has_scales(self, index: int) -> bool:
        """Whether `start_gather` makes no thread wait."""
        return self._can_wait_elsewhere or index not in self._rounds or self._rounds[index].is_known

    def start_gather(self, index: int) -> Pending:
        """Round this rank's part of a bucket, and send it; on CUDA all of it on the current stream."""
        begin, end = self._domain.own(self._ranges[index])
        if index in self._rounds:  # not a bucket of padding alone
            self._finish(self._rounds.pop(index))
            for place, first, values in self._own_parts(index):
                target = self._values[first : first + values.numel()].view(self._dtype)
                target.copy_(cast(values, self._scale_inv[place], self._dtype))
        buffer = self._values[self._ranges[index].begin : self._ranges[index].end]
        return start_all_gather(buffer, self._values[begin:end], self._domain.instance)

    def _finish(self, round_: _Round) -> None:
        if not round_.is_known:
            # A GPU's host does not wait here, and compute waits for the gather.
            round_.pending.wait(None if self._can_wait_elsewhere else self._clock)
            amax = round_.bits.view(torch.float32)
            self._scale_inv[round_.members].copy_(scale_inv_of(amax, self._dtype))
            round_.is_known = True

    def _own_parts(self, index: int) -> list[tuple[int, int, torch.Tensor]]:
        """The parameters in this rank's part of a bucket: place, where the part begins, and values."""
        begin, end = self._domain.own(self._ranges[index])
        own = self.shard(index)
        return [
            (self._places[param.parameter], param.begin, own[param.begin - begin : param.end - begin])
            for param in self._ranges[index].params_within(begin, end)
        ]

    # Whole weights.

    def new_whole(self) -> torch.Tensor:
        """(numel,) memory for `gather_whole`."""
        return self.own.new_empty(self._values.numel())

    @torch.no_grad()
    def gather_whole(self, whole: torch.Tensor) -> None:
        """Give parameters that are not whole their own type, gathered from all ranks; a collective."""
        gathers = []
        for index, bucket_range in self._ranges.items():
            begin, end = self._domain.own(bucket_range)
            own = whole[begin:end].copy_(self.shard(index))
            buffer = whole[bucket_range.begin : bucket_range.end]
            gathers.append(start_all_gather(buffer, own, self._domain.instance))
        for gather in gathers:
            gather.wait(self._clock)
        self._whole = whole
        self._point(whole)

    @torch.no_grad()
    def take_whole(self) -> None:
        """Round what parameters hold now, the same on all ranks, and give up the whole weights."""
        assert self._whole is not None
        for index, bucket_range in self._ranges.items():
            begin, end = self._domain.own(bucket_range)
            self.shard(index).copy_(self._whole[begin:end])
        weights = [parameter.detach().view(-1) for parameter, _ in self._members]
        self._scale_inv.copy_(scale_inv_of(torch.stack(_largest(weights)), self._dtype))
        values = self._values.view(self._dtype)
        for (_, begin), weight, scale_inv in zip(self._members, weights, self._scale_inv, strict=True):
            values[begin : begin + weight.numel()].copy_(cast(weight, scale_inv, self._dtype))
        self._whole = None
        self._point(values)
        for (parameter, _), scale_inv in zip(self._members, self._scale_inv, strict=True):
            parameter.scale_inv = scale_inv  # type: ignore[attr-defined]
            # Otherwise autograd would round gradients to 8 bits.
            parameter.grad_dtype = self._domain.dtype

    def _point(self, flat: torch.Tensor) -> None:
        for parameter, begin in self._members:
            parameter.data = flat[begin : begin + parameter.numel()].view(parameter.shape)
        increment_version([parameter for parameter, _ in self._members])


class WholeWeights:
    """All weights of a rank in their own type, as long as somebody reads or writes them.

    Args:
        flats: the weights that have another form otherwise.
        trained: is told of the memory that they get.
    """

    def __init__(self, flats: Iterable[EightBitFlat], trained: TrainedParameters) -> None:
        self._flats, self._trained = list(flats), trained
        self._num_readers = 0

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Context in which they are whole; a collective over the whole job. Others inside it change nothing.

        Raises:
            torch.OutOfMemoryError: one rank has no memory for them; PatchError on the others.
        """
        with all_or_none():  # also over ranks without any, which would go on alone
            found = [(flat, flat.new_whole()) for flat in self._flats if not flat.is_whole]
        for flat, whole in found:
            flat.gather_whole(whole)
            self._trained.note(flat.parameters)
        self._num_readers += 1
        try:
            yield
        finally:
            self._num_readers -= 1
            if not self._num_readers:
                self.end()

    def end(self) -> None:
        """Round what they hold now, where they are whole."""
        for flat in self._flats:
            if flat.is_whole:
                flat.take_whole()
                self._trained.note(flat.parameters)


def check_whole(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Refuse to read or write rounded weights.

    Raises:
        TrainingError: some are rounded.
    """
    if any(parameter.itemsize == 1 for parameter in parameters):
        raise TrainingError(
            "got weights in 8 bits (--fp8-param-gather), expected whole ones: read and write weights "
            "within `optimizer.full_weights()`"
        )


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
