"""OverlappedDistributedOptimizer: communication that nobody waits for.

One step has three phases:

    reduce   while backward runs, full buckets are reduced (grad_buffer.py); what spans tensor-parallel ranks
             or pipeline stages is summed at the end, so that every gradient is final
    update   the global norm decides clipping; each bucket's shard is updated, first-needed bucket first
    gather   each updated bucket's weights travel at once, while later buckets are updated and the next
             forward begins (param_buffer.py)

Design after Megatron-LLaMA's optimizer of this name (alibaba/Megatron-LLaMA,
megatron/optimizer/overlapped_dist_optimizer.py) and ZeRO (Rajbhandari et al., arXiv:1910.02054).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import chain, groupby
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.compat.torch_internals import foreach_norm
from patch.config.schema import OptimizerConfig
from patch.distributed.async_collectives import WaitClock
from patch.optimizer.grad_buffer import GradientBuckets
from patch.optimizer.hybrid_adam import HybridAdam, Offload
from patch.optimizer.layout import BucketShard, ParamRange, ParamSpec, ShardRange, lay_out
from patch.optimizer.loss_scale import LossScale
from patch.optimizer.param_buffer import FlatWeights
from patch.optimizer.placement import Move
from patch.optimizer.refusals import TrainedParameters, check_parameters
from patch.optimizer.sharded_state import sharded_ranges, zeros_of_frozen

_Key = TypeVar("_Key")
_STATE = "optimizer.state"
"""What the keys of states in checkpoints begin with."""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class OverlappedDistributedOptimizer:
    """AdamW over the shards of a flat parameter buffer.

    Args:
        stages: the pipeline stages of this rank, in the order in which a batch passes them; their trainable
            parameters are re-pointed into the flat buffer.
        optimizer: rates, decay, clipping, bucket size.
        level: data-parallel sharding: none, optimizer (ZeRO-1) or gradients (ZeRO-2).
        groups: dp_cp, tp, mp and embd are used.
        offload: where states may go; None: all stay on the parameters' device.
    Raises:
        ConfigError: parameters that it cannot train, see `check_parameters`.
    """

    def __init__(
        self,
        stages: Sequence[torch.nn.Module],
        optimizer: OptimizerConfig,
        level: str,
        groups: ProcessGroupCollection,
        offload: Offload | None = None,
    ) -> None:
        # Backward completes gradients in about the reverse of the order of registration.
        named, specs = [], []
        for stage, model in reversed(list(enumerate(stages))):
            trained = [n for n in reversed(list(model.named_parameters())) if n[1].requires_grad]
            named += trained
            specs += [_spec_of(parameter, stage) for _, parameter in trained]
        check_parameters(stages, named)
        self.parameters = [parameter for _, parameter in named]
        like = _like(self.parameters, stages)
        self.config, self.groups = optimizer, groups
        self.loss_scale = LossScale(1.0, 0)
        if like.dtype == torch.float16:
            self.loss_scale = LossScale(optimizer.initial_loss_scale, optimizer.loss_scale_window)
        self.is_sharded = level != "none" and groups.dp_cp.size() > 1
        level = level if self.is_sharded else "none"
        num_shards = groups.dp_cp.size() if self.is_sharded else 1
        bucket_ranges = lay_out(specs, optimizer.reduce_bucket_size, num_shards)
        self.clock = WaitClock(like.device)
        self.weights = FlatWeights(
            stages,
            self.parameters,
            bucket_ranges,
            like=like,
            num_shards=num_shards,
            group=groups.dp_cp,
            arrive=self._arrive,
            clock=self.clock,
        )
        self._trained = TrainedParameters(stages, named)
        self.gradients = GradientBuckets(
            self.parameters,
            [name for name, _ in named],
            bucket_ranges,
            like=like,
            level=level,
            group=groups.dp_cp,
            dtype=_DTYPES[optimizer.main_grads_dtype],
            clock=self.clock,
        )
        rank = groups.dp_cp.rank() if self.is_sharded else 0
        self._own_params = [
            bucket_range.params_within(*bucket_range.shard(rank, num_shards))
            for bucket_range in bucket_ranges
        ]
        self._begins = [bucket_range.shard(rank, num_shards)[0] for bucket_range in bucket_ranges]
        shards = [self._shard(index) for index in range(len(bucket_ranges))]
        fixed_bytes = self.weights.flat.nbytes + self.gradients.num_bytes
        self.adam = HybridAdam(shards, optimizer, offload, fixed_bytes)
        self.gradients.on_final = self.adam.gradient_ready
        # Of modules that this step's forward did not use: an update on the host may still read gradients, and
        # the next one of all is to write weights that no other writes.
        self.gradients.on_backward = self.wait_for_weights

    def _shard(self, index: int) -> BucketShard:
        begin = self._begins[index]
        ranges = [
            ShardRange(run.begin - begin, run.end - begin, is_decayed, needs_extra_reduction)
            for (is_decayed, needs_extra_reduction), run in _merged(self._own_params[index], self._treatment)
        ]
        return BucketShard(self.gradients.buckets[index].shard, self.weights.shard(index), ranges)

    def _arrive(self, index: int, *, block: bool) -> bool:
        return self.adam.arrive(index, block=block)

    def connect(self, upstream: ModelParallelConfig) -> None:
        """Give megatron-core's schedules, which read it from the model's configuration, what they ask for."""
        upstream.no_sync_func = self.no_sync
        upstream.grad_scale_func = self.loss_scale.apply

    def start_step(self, lr: float) -> None:
        """Forget the last step's gradients; call before the first forward of a step.

        Args:
            lr: rate of this step.
        Raises:
            TrainingError: the trainable parameters are not those of the construction.
        """
        self._trained.check()
        self._lr = lr
        self.gradients.start_step()
        self.adam.start_step(lr, 1.0 / self.loss_scale.value)

    def place(self) -> list[Move]:
        """Let the policy move states between host and device; call between two steps. What has moved."""
        return self._move(self.adam.wanted_moves())

    def make_room(self, num_bytes: int) -> list[Move]:
        """Out of memory: move states of at least `num_bytes` to the host, if the device has them.

        A step that has begun is not taken; it may be begun again.
        """
        return self._move(self.adam.evictions(num_bytes))

    def _move(self, moves: list[Move]) -> list[Move]:
        if not moves:
            return []
        self.adam.cancel()
        self.weights.send()
        return self.adam.move(moves)

    def no_sync(self) -> AbstractContextManager[None]:
        """What megatron-core's schedules put around all micro-batches but the last (`no_sync_func`)."""
        return self.gradients.no_sync()

    def watch(self, output: torch.Tensor, stage: int = 0) -> None:
        """Tell which tensor a micro-batch's backward through a stage begins at; call in the forward step."""
        self.gradients.watch(output, stage)

    def give_up(self, num_micro_batches: int) -> None:
        """An error ended forward or backward of a step: send what the other ranks expect all the same.

        The step is to be begun again, by all of them. For ranks that hold the whole model.
        """
        self.wait_for_weights()
        for parameter in self.parameters:
            parameter.grad = None  # one that its bucket had no memory for
        self.gradients.give_up(num_micro_batches)

    def flush_gradients(self) -> None:
        """Start all reductions of the step, so that every rank's later messages come behind them."""
        self.gradients.flush()

    @torch.no_grad()
    def finish_gradients(self) -> None:
        """Make every gradient that of the global batch; call when all backwards are done."""
        self.gradients.finish()
        if self.groups.tp.size() > 1:
            self._sum_sequence_parallel()
        for bucket in self.gradients.buckets:
            for param in bucket.range.params[:1]:  # a tied embedding is alone in its bucket
                if getattr(self.parameters[param.parameter], "shared_embedding", False):
                    with self.clock.waiting():
                        dist.all_reduce(bucket.shard, group=self.groups.embd)

    def _sum_sequence_parallel(self) -> None:
        """Sum over TP the gradients of which each TP rank saw a part of the tokens, in one message."""
        parts = [
            self._part(self.gradients.buckets[index].shard, index, param)
            for index, found in enumerate(self._own_params)
            for param in found
            if getattr(self.parameters[param.parameter], "sequence_parallel", False)
        ]
        if parts:
            coalesced = torch.cat(parts)
            with self.clock.waiting():
                dist.all_reduce(coalesced, group=self.groups.tp)
            for part, summed in zip(parts, coalesced.split([part.numel() for part in parts]), strict=True):
                part.copy_(summed)

    @torch.no_grad()
    def gradient_norm(self) -> float:
        """Global L2 norm of the unscaled gradients of the whole model, each weight counted once.

        Sums are in float64.
        It is the finite check too: infinity or NaN anywhere shows in it, on every rank.
        """
        counted = [
            self._part(bucket.shard, index, run)
            for index, bucket in enumerate(self.gradients.buckets)
            for is_counted, run in _merged(self._own_params[index], self._is_counted)
            if is_counted
        ]
        # On a GPU vector_norm would first write a copy of the gradients in float64.
        norms = foreach_norm(counted, 2, dtype=torch.float64) if counted else []
        zero = torch.zeros((), dtype=torch.float64, device=self.weights.flat.device)
        total = torch.stack([zero, *(norm**2 for norm in norms)]).sum()
        # Shards differ on all ranks of the job; replicas only over the ranks that share a model.
        dist.all_reduce(total, group=None if self.is_sharded else self.groups.mp)
        return total.sqrt().item() / self.loss_scale.value

    @torch.no_grad()
    def step(self, grad_norm: float) -> None:
        """Update every shard and send the new weights on their way.

        Args:
            grad_norm: what `gradient_norm` returned, finite.
        """
        limit = self.config.clip_grad
        scale = (min(1.0, limit / (grad_norm + 1e-6)) if limit > 0 else 1.0) / self.loss_scale.value
        self.loss_scale.keep()
        self.adam.start_update(self._lr, scale)
        # The next forward needs the last bucket of backward first.
        order = list(reversed(range(len(self._own_params))))
        for indices in [[index] for index in order] if self.is_sharded else [order]:
            self.adam.update(indices)
            for index in indices:
                self.weights.renew(index)

    def wait_for_weights(self) -> None:
        """Wait until every parameter has its new value; call before reading parameters raw."""
        self.weights.wait()

    def take_weights(self) -> None:
        """Go on from the weights that the model has now; call after loading them in any way but a resume."""
        self.wait_for_weights()
        self.adam.refresh_masters()

    def sharded_state_dict(
        self, model_state: ShardedStateDict, *, is_loading: bool = False
    ) -> ShardedStateDict:
        """States as sharded tensors of the weights' global shapes, whatever DP, TP, PP or bucket size.

        They are views: loading into them loads the optimizer. What masters have in common with weights
        (all of it in fp32, the high bits in bf16) is left to the model's state.

        Args:
            model_state: the model's sharded_state_dict, whose entries hold the parameters themselves.
            is_loading: leave out the zeros that fill up states of partly frozen layers.
        """
        dp_rank = 0 if self.is_sharded else self.groups.dp_cp.rank()
        sharded: ShardedStateDict = {}
        for name in self.adam.dtypes:
            ranges = [
                (self.parameters[param.parameter], param.offset + begin - first, state)
                for index, found in enumerate(self._own_params)
                for param in found
                for first in [param.begin - self._begins[index]]
                for begin, state in self.adam.state(name, index, first, first + param.end - param.begin)
            ]
            sharded |= sharded_ranges(model_state, ranges, f"{_STATE}.{name}", dp_rank)
        if not is_loading:
            trained = {id(parameter) for parameter in self.parameters}
            dp_rank = self.groups.dp_cp.rank()
            sharded |= zeros_of_frozen(model_state, trained, self.adam.dtypes, _STATE, dp_rank)
        return sharded

    def _part(self, shard: torch.Tensor, index: int, param: ParamRange) -> torch.Tensor:
        """A parameter's elements within this rank's shard of bucket `index`."""
        begin = self._begins[index]
        return shard[param.begin - begin : param.end - begin]

    def _treatment(self, param: ParamRange) -> tuple[bool, bool]:
        """Whether a parameter decays, and whether its gradient is summed over more ranks than the bucket."""
        parameter = self.parameters[param.parameter]
        is_summed_over_tp = self.groups.tp.size() > 1 and getattr(parameter, "sequence_parallel", False)
        return parameter.ndim > 1, is_summed_over_tp or getattr(parameter, "shared_embedding", False)

    def _is_counted(self, param: ParamRange) -> bool:
        """Whether this rank counts a parameter in the norm, of those that hold a copy."""
        parameter = self.parameters[param.parameter]
        is_cut = getattr(parameter, "tensor_model_parallel", False)
        return not getattr(parameter, "shared", False) and (is_cut or self.groups.tp.rank() == 0)


def _spec_of(parameter: torch.nn.Parameter, stage: int) -> ParamSpec:
    """Matrices before norms in a bucket, a tied embedding of two stages alone in its own."""
    is_tied = getattr(parameter, "shared_embedding", False)
    return ParamSpec(parameter.numel(), int(parameter.ndim <= 1), is_tied, stage)


def _merged(found: list[ParamRange], key: Callable[[ParamRange], _Key]) -> list[tuple[_Key, ParamRange]]:
    """Neighbouring pieces with the same key as one."""
    runs = []
    for value, group in groupby(found, key):
        members = list(group)
        runs.append((value, members[0]._replace(end=members[-1].end)))
    return runs


def _like(parameters: list[torch.nn.Parameter], stages: Sequence[torch.nn.Module]) -> torch.Tensor:
    """A tensor of the type and device that is trained; where nothing is, of the frozen parameters."""
    frozen = chain.from_iterable(stage.parameters() for stage in stages)
    return next(chain(parameters, frozen), torch.empty(0)).detach()
