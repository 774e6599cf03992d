"""OverlappedDistributedOptimizer: communication that nobody waits for.

A step on a rank:

    zero_grad            the gradients of the last step are forgotten
    (forward, backward)  while backward runs, full buckets are reduced (grad_buffer.py)
    start_grad_sync      the buckets that are left are reduced
    finish_grad_sync     what spans tensor-parallel ranks or pipeline stages is summed: gradients are final
    step                 the global norm decides clipping; each bucket's shard is updated, first-needed
                         bucket first; each updated bucket's parameters travel at once, while later buckets
                         are updated and the next forward begins (param_buffer.py)

Design after Megatron-LLaMA's optimizer of this name (alibaba/Megatron-LLaMA,
megatron/optimizer/overlapped_dist_optimizer.py) and ZeRO (Rajbhandari et al., arXiv:1910.02054).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.config.choices import ZeroStage
from patch.config.schema import OptimizerConfig
from patch.device import torch_dtype
from patch.distributed.async_collectives import Pending, WaitClock
from patch.errors import CheckpointError, TrainingError
from patch.layout.buckets import lay_out
from patch.memory import OffloadDevice
from patch.optimizer.domain import Domain, find_domains, find_instances
from patch.optimizer.grad_buffer import GradBuffer, LocalCheck
from patch.optimizer.hybrid_adam import HybridAdam, Offload, OptimizerReport, state_dtypes
from patch.optimizer.loss_scale import loss_scale_of
from patch.optimizer.main_grad import is_fused
from patch.optimizer.own_shards import OwnShards
from patch.optimizer.param_buffer import ParamBuffer
from patch.optimizer.param_groups import ParamGroup, assign_groups, default_param_groups
from patch.optimizer.placement import Move
from patch.optimizer.sharded_state import sharded_ranges, zeros_of_frozen
from patch.optimizer.trained import (
    TrainedParameters,
    check_arguments,
    check_gathers,
    check_parameters,
    like_trained,
    specs_of,
    trained_in,
)

_STATE = "optimizer.state"
"""What the keys of states in checkpoints begin with."""


class StepOutcome(NamedTuple):
    """What `step` did."""

    grad_norm: float
    """Global L2 norm of the gradients before clipping; not finite where the update was skipped."""
    is_skipped: bool
    """Whether nothing was updated, because the gradient norm is not finite."""
    is_overflow: bool
    """Whether that was an overflow of fp16: the loss scale was halved."""


class OverlappedDistributedOptimizer:
    """AdamW over the shards of flat parameter buffers.

    Args:
        stages: the pipeline stages of this rank, in the order in which a batch passes them; their trainable
            parameters are re-pointed into the flat buffers.
        config: rates, decay, clipping, bucket size.
        zero_stage: what data-parallel ranks share.
        groups: dp_cp, tp, mp and embd are used; of several instances also intra_dp_cp and inter_dist_opt.
        offload: where states may go; None: all stay on the parameters' device.
        param_groups: every trainable parameter is in one of them; None: `default_param_groups`.
    Raises:
        ConfigError: other arguments than these; parameters that it cannot train, see `check_parameters`, or a
            parameter in no group or in several.
    """

    def __init__(
        self,
        stages: Sequence[torch.nn.Module],
        config: OptimizerConfig,
        zero_stage: ZeroStage,
        groups: ProcessGroupCollection,
        offload: Offload | None = None,
        param_groups: Sequence[ParamGroup] | None = None,
    ) -> None:
        check_arguments(stages, zero_stage)
        named, stage_indices = trained_in(stages)
        check_parameters(stages, named, is_offloading=offload is not None)
        if param_groups is None:
            param_groups = default_param_groups(stages, config, groups)
        self.param_groups = param_groups
        group_indices = assign_groups(named, self.param_groups)
        self.parameters = [parameter for _, parameter in named]
        like = like_trained(self.parameters, stages)
        self.config, self.groups, self.device = config, groups, like.device
        domains, domain_indices = self._find_domains(zero_stage, group_indices, like.dtype)
        check_gathers(domains, is_offloading=offload is not None)
        specs = specs_of(named, stage_indices, group_indices, domain_indices)
        self.loss_scale = loss_scale_of(config, [domain.dtype for domain in domains])
        self.is_sharded = domains[0].zero_stage is not ZeroStage.NONE
        shares, is_sent = [d.num_shards for d in domains], any(d.group.size() > 1 for d in domains)
        is_padded = is_sent and config.ddp_pad_buckets_for_high_nccl_busbw
        bucket_ranges = lay_out(specs, config.reduce_bucket_size, shares, is_padded=is_padded)
        self._clock = WaitClock(self.device)
        self._lr: float | Sequence[float] | None = None
        """The rates of the step that has begun; None: none has."""
        self._is_grad_synced, self._num_reading = False, 0  # contexts of `full_weights` that are open
        self.param_buffer = ParamBuffer(
            stages,
            self.parameters,
            bucket_ranges,
            domains=domains,
            device=self.device,
            wait_for_update=lambda index, block: self.adam.wait_for_update(index, block=block),
            clock=self._clock,
        )
        self._trained = TrainedParameters(stages, named)
        self.grad_buffer = GradBuffer(
            stages,
            named,
            bucket_ranges,
            like=torch.empty(0, dtype=torch_dtype(config.main_grads_dtype), device=self.device),
            domains=domains,
            group=groups.dp_cp,
            clock=self._clock,
            on_backward=self._finish_updates,
            on_final=self._on_final_gradient,
            is_fused=is_fused(config, self.device),
        )
        self._own = OwnShards(self.parameters, specs, self.grad_buffer.buckets, self.param_buffer, groups)
        fixed_bytes = self.param_buffer.num_bytes + self.grad_buffer.num_bytes
        self.adam = HybridAdam(self._own.shards, config, self.param_groups, offload, fixed_bytes)

    def _find_domains(
        self, zero_stage: ZeroStage, group_indices: list[int], default: torch.dtype
    ) -> tuple[list[Domain], list[int]]:
        groups = self.groups
        dp_groups = [group.data_parallel_group or groups.dp_cp for group in self.param_groups]
        # The same on all ranks of the job, whatever parameters they hold.
        is_alone = all(group.size() == 1 for group in [groups.dp_cp, *dp_groups])
        self._has_other_ranks = any(group is not groups.dp_cp for group in dp_groups)
        return find_domains(
            [
                (dp_groups[i], p.dtype, getattr(p, "gather_dtype", None))
                for i, p in zip(group_indices, self.parameters, strict=True)
            ],
            ZeroStage.NONE if is_alone else zero_stage,
            default=(groups.dp_cp, default),
            instances=find_instances(groups, zero_stage, dp_groups),
            travels_as=torch.bfloat16 if self.config.grad_reduce_in_bf16 else None,
        )

    def _on_final_gradient(self, index: int, after: Pending | None) -> None:
        self.adam.grad_ready(index, after)
        if after is None and self.device.type == "cpu":  # a GPU computes all norms at the end, at one go
            self._own.start_norm(index)

    def _finish_updates(self) -> None:
        # Modules that this step's forward did not use have not waited for their weights: their updates on the
        # host end before their gradients are overwritten.
        self.finish_param_sync()
        self.param_buffer.start_gathers_of_others()

    def connect(self, model_config: ModelParallelConfig) -> None:
        """Set `no_sync_func` and `grad_scale_func` on the TransformerConfig, where megatron-core looks."""
        model_config.no_sync_func = self.no_sync
        model_config.grad_scale_func = self.scale_loss

    # The step.

    def zero_grad(self, lr: float | Sequence[float]) -> None:
        """Forget the last step's gradients; call before the first backward of a step.

        Args:
            lr: rate of this step; for all parameter groups, or one for each of `param_groups`.
        Raises:
            TrainingError: the trainable parameters are not those of the construction, or the rates are not as
                many as the groups.
        """
        self._trained.check()
        if self.param_buffer.is_whole:
            self._take_full_weights()
        self._lr, self._is_grad_synced = lr, False
        self.grad_buffer.reset()
        self._own.forget_norms()
        self.adam.start_step(lr, 1.0 / self.loss_scale.value)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """What backward starts from: the loss, multiplied by the loss scale in fp16."""
        return self.loss_scale.apply(loss)

    def no_sync(self) -> AbstractContextManager[None]:
        """Context of the backwards of all micro-batches but a step's last one, as in torch's DDP."""
        return self.grad_buffer.no_sync()

    def start_grad_sync(self) -> None:
        """Start the reductions that are left; call when all backwards are done.

        Messages that this rank sends afterwards travel behind them.
        """
        self.param_buffer.start_gathers_of_others()
        self.grad_buffer.start_grad_sync()

    @torch.no_grad()
    def finish_grad_sync(self) -> None:
        """Wait for the gradient reductions; `step` calls it if you have not."""
        if self._is_grad_synced:
            return
        self.param_buffer.start_gathers_of_others()
        self.grad_buffer.finish_grad_sync()
        self._own.sum_over_model_parallel(self._clock)
        self._is_grad_synced = True

    @torch.no_grad()
    def step(self, *, skip_non_finite: bool = False) -> StepOutcome:
        """Update every shard by the final gradients, and send the new parameters on their way.

        The next forward, `state_dict` and `module.weight` wait for them; elsewhere parameters are old until
        `finish_param_sync`. Gradients that are not finite are seen before anything is written.

        Args:
            skip_non_finite: skip the update where no smaller loss scale could cure them, instead of raising.

        Raises:
            TrainingError: the gradient norm is not finite, and that is neither cured nor skipped; or
                `zero_grad` was not called.
        """
        if self._lr is None:
            raise TrainingError("`step` without gradients, expected `zero_grad(lr)` and a backward before it")
        self.finish_grad_sync()
        grad_norm = self.get_grad_norm()
        is_finite = math.isfinite(grad_norm)
        is_overflow = not is_finite and self.loss_scale.may_cure
        if is_finite:
            self._update(grad_norm, self._lr)
        elif is_overflow:
            self.loss_scale.shrink()
        elif not skip_non_finite:
            raise TrainingError(
                f"optimizer step {self.adam.step_count + 1}: gradient norm {grad_norm}, expected a finite "
                "number; the weights are those of the step before. Lower --lr, raise --lr-warmup-iters, or "
                "look at this step's data"
            )
        self._lr = None
        return StepOutcome(grad_norm, not is_finite, is_overflow)

    @contextmanager
    def checking_local_gradients(self) -> Iterator[LocalCheck]:
        """Context of a backward that is only looked at: are this rank's own gradients finite, before sums?

        Within it: `zero_grad`, the micro-batches, `finish_grad_sync`. No update follows.
        """
        check = self.grad_buffer.local_check = LocalCheck()
        try:
            yield check
        finally:
            self.grad_buffer.local_check = None
            self.adam.cancel_step()
            self._lr = None

    @torch.no_grad()
    def get_grad_norm(self) -> float:
        """Global L2 norm of the unscaled gradients of the whole model, each weight counted once.

        Infinity or NaN anywhere shows in it, on every rank.
        """
        # Shards differ on all ranks of the job; replicas only over the ranks that share a model.
        group = None if self.is_sharded or self._has_other_ranks else self.groups.mp
        return self._own.grad_norm(group) / self.loss_scale.value

    def _update(self, grad_norm: float, lr: float | Sequence[float]) -> None:
        limit = self.config.clip_grad
        scale = (min(1.0, limit / (grad_norm + 1e-6)) if limit > 0 else 1.0) / self.loss_scale.value
        self.loss_scale.keep()
        self.adam.start_update(lr, scale)
        # The next forward needs the last bucket of backward first.
        units = self.param_buffer.units()[::-1]
        for indices in _doubling(units) if self.is_sharded else [list(chain.from_iterable(units))]:
            self.adam.update(indices)
            self.param_buffer.start_scales(indices)
            for index in indices:
                self.param_buffer.start_param_sync(index)
        self.param_buffer.start_scales([])

    def abandon_backward(self, num_micro_batches: int) -> None:
        """An error ended forward or backward of a step: send what the other ranks expect all the same.

        The step is to be begun again, by all of them. For ranks that hold the whole model.

        Args:
            num_micro_batches: how many the step has on each rank.
        """
        self.finish_param_sync()
        for parameter in self.parameters:
            parameter.grad = None  # one that its bucket had no memory for
        self.grad_buffer.abandon_backward(num_micro_batches)

    # Parameters.

    def start_param_sync(self) -> None:
        """Wait for this rank's updates, and start the gathers that are left; wait for no other rank."""
        self.param_buffer.start_all_gathers()

    def finish_param_sync(self) -> None:
        """Wait until every parameter has its new value; call before reading parameters raw."""
        self.param_buffer.finish_param_sync()

    @contextmanager
    def full_weights(self) -> Iterator[None]:
        """Context in which every parameter has its new value in its own type; a collective over the job.

        Only weights that are gathered in 8 bits (`--fp8-param-gather`) have another type outside of it.
        Whoever reads or writes the model's weights then opens it. What was written, the same on all ranks
        that hold a parameter, is what training goes on from.
        Contexts inside it change nothing.
        """
        self.finish_param_sync()
        self.param_buffer.gather_whole()
        self._trained.note(self.param_buffer.in_8_bits)
        self._num_reading += 1
        try:
            yield
        finally:
            self._num_reading -= 1
            if not self._num_reading:
                self._take_full_weights()

    def _take_full_weights(self) -> None:
        self.param_buffer.take_whole()
        self._trained.note(self.param_buffer.in_8_bits)

    def reload_model_params(self) -> None:
        """Go on from the weights that the model has now; call after loading them in any way but a resume."""
        self.finish_param_sync()
        self.adam.copy_model_params_to_main_params()

    # Where states lie.

    def apply_placement(self) -> list[Move]:
        """Let the policy move states between host and device; call between two steps. What has moved."""
        return self._move(self.adam.wanted_moves())

    def evict(self, num_bytes: int) -> list[Move]:
        """Out of memory: move states of at least `num_bytes` to the host, if the device has them.

        A step that has begun is not taken; it may be begun again.
        """
        return self._move(self.adam.evictions(num_bytes))

    def _move(self, moves: list[Move]) -> list[Move]:
        if not moves:
            return []
        self.adam.cancel_step()
        self.start_param_sync()
        return self.adam.move(moves)

    @property
    def is_offloading(self) -> bool:
        """Whether states may leave the device in this run."""
        return self.adam.is_offloading

    @property
    def offload_device(self) -> OffloadDevice | None:
        """The device that states may leave."""
        return self.adam.offload_device

    @property
    def can_evict(self) -> bool:
        """Whether there are states on the device that may leave it."""
        return self.adam.can_evict

    def count_activations(self) -> AbstractContextManager[None]:
        """Context of forward and backward, so that a simulated device sees what they hold."""
        return self.adam.count_activations()

    # Reports.

    @property
    def offload_fraction(self) -> float:
        """Share of the elements whose states are in host memory."""
        return self.adam.manager.offload_fraction

    def report(self) -> OptimizerReport:
        """Where states lie on this rank now, and what that costs."""
        return self.adam.report()

    def record_memory(self, kind: str) -> None:
        """Note for placement `auto` what the device held at most since the last call.

        Args:
            kind: of what: "train" of a step, "evaluate", "save".
        """
        self.adam.record_memory(kind)

    def exposed_communication_ms(self) -> float:
        """Milliseconds that compute waited for gradients and parameters since the last call."""
        return self._clock.read_ms()

    # State.

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to go on, beside the model's state_dict; call it on all ranks.

        It fits the same model, bucket size, number of ranks and ZeRO stage; `sharded_state_dict` fits any.

        Returns:
            `common_state_dict()` and "states": each state of this rank's shards, flat, on the CPU.
        """
        self.finish_param_sync()
        states = {
            name: torch.cat([torch.empty(0, dtype=dtype), *(values.cpu() for values in self._views(name))])
            for name, dtype in self.adam.dtypes.items()
        }
        return {**self.common_state_dict(), "states": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned on this rank; the model loads its weights by itself.

        Raises:
            CheckpointError: the states are those of other shards.
        """
        self.finish_param_sync()
        views = {name: self._views(name) for name in self.adam.dtypes}
        expected = {name: sum(values.numel() for values in found) for name, found in views.items()}
        got = {name: values.numel() for name, values in state["states"].items()}
        if got != expected:
            raise CheckpointError(
                f"optimizer states have {got} elements on this rank, expected {expected}: load them with the "
                "model, bucket size, number of ranks and ZeRO stage that they were saved with"
            )
        for name, found in views.items():
            parts = state["states"][name].split([values.numel() for values in found])
            for values, part in zip(found, parts, strict=True):
                values.copy_(part)
        self.load_common_state_dict(state)

    def _views(self, name: str) -> list[torch.Tensor]:
        """A state of this rank's shards, parameter after parameter."""
        return [part.values for part in self._own.state_ranges(partial(self.adam.state, name))]

    def common_state_dict(self) -> dict[str, Any]:
        """What is the same on all ranks: the number of steps and the loss scale."""
        return {"optimizer_steps": self.adam.step_count, "loss_scale": self.loss_scale.state_dict()}

    def load_common_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `common_state_dict` returned; other entries of `state` are not read."""
        self.adam.step_count = state["optimizer_steps"]
        self.loss_scale.load_state_dict(state["loss_scale"])

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
        sharded: ShardedStateDict = {}
        for name in self.adam.dtypes:
            ranges = self._own.state_ranges(partial(self.adam.state, name))
            sharded |= sharded_ranges(model_state, ranges, f"{_STATE}.{name}")
        if not is_loading:
            trained = {id(parameter) for parameter in self.parameters}
            sharded |= zeros_of_frozen(model_state, trained, state_dtypes, _STATE)
        return sharded


def _doubling(units: list[list[int]]) -> Iterator[list[int]]:
    """The indices of one unit, of two, of four, ...: the first gather starts at once, and few calls are made
    for the others."""
    begin, size = 0, 1
    while begin < len(units):
        yield list(chain.from_iterable(units[begin : begin + size]))
        begin, size = begin + size, 2 * size
