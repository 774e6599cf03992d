"""The gradients of a rank: flat buffers, cut into buckets, in which backward collects them.

The buffer group's ZeRO stage (buffer_group.py) says how a bucket is reduced and what a rank keeps. A rank
that keeps only its shards stages buckets in a few rotating buffers (bucket.py). Each buffer group has its own
flat buffer. step_schedule.py decides when gradients are collected and reduced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from patch.config.schema import OptimizerConfig
from patch.device import torch_dtype
from patch.distributed.async_collectives import RoundedSums, follows_on_device
from patch.errors import TrainingError
from patch.layout.buckets import NUM_STAGING, ParamRange
from patch.optimizer.buckets.bucket import Bucket, Staging
from patch.optimizer.buckets.buffer_group import BufferGroup, FlatLayout
from patch.optimizer.buckets.main_grad import DummyWgrads, MainGrad


class ParamGrad(NamedTuple):
    """The places of one parameter's gradient."""

    name: str
    parameter: torch.nn.Parameter
    parts: list[tuple[Bucket, ParamRange]]
    """Its buckets, each with the part of the parameter in the bucket."""

    def part(self, gradient: torch.Tensor, param: ParamRange) -> torch.Tensor:
        """Return the part of a gradient that belongs to one of `parts`."""
        if len(self.parts) == 1:
            return gradient
        return gradient.reshape(-1)[param.offset : param.offset + param.end - param.begin]

    def check(self, gradient: torch.Tensor | None) -> None:
        """Refuse a gradient that another hook took, or that is sparse, with a TrainingError."""
        if gradient is None:
            raise TrainingError(
                f"{self.name}: another post-accumulate-grad hook took its gradient, expected none that sets "
                ".grad"
            )
        if gradient.layout != torch.strided:
            raise TrainingError(
                f"{self.name}: a gradient of layout {gradient.layout}, expected dense (sparse=False)"
            )

    def without_forward(self, stage: int) -> TrainingError:
        """Return the error for a gradient outside of any micro-batch."""
        return TrainingError(
            f"{self.name}: a gradient without a forward of stage {stage} in this step, expected one: call "
            "the model that the optimizer was built with (`model(...)`), not only a part of it, and "
            "`zero_grad` between steps"
        )

    def too_late(self, *, is_first: bool) -> TrainingError:
        """Return the error for a micro-batch's first or further gradient after its bucket was reduced."""
        if is_first:
            return TrainingError(
                f"{self.name}: got a gradient after backward had reached an earlier module, expected modules "
                "that run in the order in which the model lists them. Reorder them, or use "
                "--data-parallel-sharding gradients"
            )
        return TrainingError(
            f"{self.name}: a second gradient after its bucket was reduced, expected one a micro-batch: it is "
            "used in several reentrant checkpoints. Use use_reentrant=False, or --data-parallel-sharding "
            "optimizer, which waits for all of them where the first micro-batch has them too"
        )


class GradBuffer:
    """The memory of the gradients of a rank's pipeline stages.

    Args:
        layout: the layout of the parameters.
        config: the dtype of collected gradients, and whether layers accumulate gradients themselves.
    """

    def __init__(self, layout: FlatLayout, config: OptimizerConfig) -> None:
        buffer_groups, bucket_ranges = layout.buffer_groups, layout.bucket_ranges
        like = torch.empty(0, dtype=torch_dtype(config.main_grads_dtype), device=layout.held.device)
        largest = max(bucket_range.numel for bucket_range in bucket_ranges)
        self._rounded_sums = _rounded_sums(largest, buffer_groups[0], like.device)
        self._buffer_groups = buffer_groups
        self._flats = [
            buffer_group.kept_gradients(like, numel)
            for buffer_group, numel in zip(buffer_groups, layout.numels, strict=True)
        ]
        self.buckets: list[Bucket] = []
        parts: dict[int, list[tuple[Bucket, ParamRange]]] = {}
        for index, bucket_range in enumerate(bucket_ranges):
            group, flat = buffer_groups[bucket_range.buffer_group], self._flats[bucket_range.buffer_group]
            shard, buffer = group.places(flat, bucket_range)
            bucket = Bucket(index, bucket_range, shard, buffer, group, self._rounded_sums)
            self.buckets.append(bucket)
            for param in bucket_range.params:
                parts.setdefault(param.parameter, []).append((bucket, param))
        self.params = [ParamGrad(*layout.held.named[index], places) for index, places in parts.items()]
        """The places of each parameter's gradient, in bucket order."""
        # The bucket of parameters without a unit, mostly norms, stays open for a whole backward.
        staged = [each for each in bucket_ranges if buffer_groups[each.buffer_group].is_staged]
        largest = max((each.numel for each in staged), default=0)
        others = [each for each in bucket_ranges if not each.unit]
        last = max((each.numel for each in others if each in staged), default=0) if others else largest
        numels = [*[largest] * (NUM_STAGING - 1), *([last] if last else [])][: len(staged)]
        self.staging = Staging(like, numels) if buffer_groups[0].stage.shards_gradients else None
        self._is_fused, self._dummy_wgrads = config.fuses_gradients(cuda=like.is_cuda), DummyWgrads()

    def reset(self) -> None:
        """Drop the last step's gradients."""
        for bucket in self.buckets:
            bucket.reset()
        if self.staging is not None:
            self.staging.reset()

    @property
    def num_bytes(self) -> int:
        """Return the bytes of gradients on the device, staging buffers included."""
        others = [part.num_bytes for part in (self.staging, self._rounded_sums) if part is not None]
        flats = zip(self._flats, self._buffer_groups, strict=True)
        return sum(flat.nbytes for flat, buffer_group in flats if not buffer_group.is_on_host) + sum(others)

    def main_grad(
        self, grad: ParamGrad, find_place: Callable[[], tuple[torch.Tensor, bool]]
    ) -> MainGrad | None:
        """Let layers write a parameter's gradient to the place that `find_place` returns, if they may."""
        # The staged parts of a parameter in several buckets are not contiguous.
        if self._is_fused and (len(grad.parts) == 1 or not grad.parts[0][0].buffer_group.is_staged):
            return MainGrad(grad.parameter, self._dummy_wgrads, find_place)
        return None

    def open_place(self, grad: ParamGrad) -> tuple[torch.Tensor, bool]:
        """Return where a layer writes a parameter's next gradient, and whether to overwrite old values."""
        places = [bucket.open_place(param) for bucket, param in grad.parts]
        place, is_first = places[0]
        if len(places) > 1:
            (bucket, first), (_, last) = grad.parts[0], grad.parts[-1]
            place = self._flats[bucket.range.buffer_group][first.begin : last.end]
        return place.view(grad.parameter.shape), is_first


def _rounded_sums(numel: int, buffer_group: BufferGroup, device: torch.device) -> RoundedSums | None:
    """Return RoundedSums if NCCL reduces in a narrower dtype; all buffer groups agree on that."""
    if buffer_group.reduce_dtype is None or not follows_on_device(buffer_group.shard_group):
        return None
    return RoundedSums(numel, buffer_group.reduce_dtype, device)
