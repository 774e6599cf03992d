"""OverlappedDistributedOptimizer: overlaps communication with compute.

A step on a rank:

    zero_grad            drop the gradients of the last step
    (forward, backward)  full buckets are reduced during backward (step_schedule.py)
    start_grad_sync      start the remaining reductions
    finish_grad_sync     sum over tensor-parallel ranks and pipeline stages: gradients are final
    step                 compute the global norm and the clipping factor; update each bucket's shard, in the
                         order in which the next forward needs buckets. The parameters of an updated bucket
                         are all-gathered during later updates and the next forward

Source: Megatron-LLaMA's optimizer of this name (alibaba/Megatron-LLaMA,
megatron/optimizer/overlapped_dist_optimizer.py) and ZeRO (Rajbhandari et al., arXiv:1910.02054).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.config.choices import ZeroStage
from patch.config.schema import OptimizerConfig
from patch.device import torch_dtype
from patch.distributed.async_collectives import WaitClock
from patch.errors import TrainingError
from patch.memory.simulated_device import SimulatedDevice
from patch.optimizer.buckets.buffer_group import check_on_host, flat_layout, frozen_layout
from patch.optimizer.buckets.fp8_params import check_gathers
from patch.optimizer.buckets.grad_buffer import GradBuffer
from patch.optimizer.buckets.param_buffer import ParamBuffer
from patch.optimizer.grad_norm import GradNorm
from patch.optimizer.hooks import ModelHooks
from patch.optimizer.loss_scale import loss_scale_of
from patch.optimizer.muon import Muon
from patch.optimizer.param_groups import Matrix, ParamGroup, default_param_groups
from patch.optimizer.states.hybrid_adam import HybridAdam, OptimizerReport
from patch.optimizer.states.offload import Offload
from patch.optimizer.states.sharded_state import ShardStates, rng_coords_of, sharded_weights
from patch.optimizer.step_schedule import LocalCheck, StepSchedule
from patch.optimizer.trainable_params import TrainableParams, check_arguments, check_rows
from patch.optimizer.zero3.sharded_params import UnitVisits, has_values


class StepOutcome(NamedTuple):
    """The outcome of `step`."""

    grad_norm: float
    """Global L2 norm of the gradients before clipping; not finite if the update was skipped."""
    is_skipped: bool
    """Whether the update was skipped because the gradient norm is not finite."""
    is_overflow: bool
    """Whether the skip was an fp16 overflow, which halves the loss scale."""


class OverlappedDistributedOptimizer:
    """AdamW over the shards of flat parameter buffers.

    Args:
        stages: the pipeline stages of this rank, in the order of forward. Their trainable parameters are
            re-pointed into the flat buffers.
        groups: dp_cp, tp, mp and embd are used; with several shard groups also intra_dp_cp and
            inter_dist_opt.
        offload: where states may go; None: all states stay on the parameters' device.
        param_groups: groups that contain every trainable parameter; None: `default_param_groups`.
        model_state: the model's sharded_state_dict, which says which part of a weight each parameter is.
        matrices: see Muon.
    Raises:
        ConfigError: an argument is invalid, or a parameter cannot be trained (`TrainableParams`).
    """

    def __init__(
        self,
        stages: Sequence[torch.nn.Module],
        config: OptimizerConfig,
        zero_stage: ZeroStage,
        groups: ProcessGroupCollection,
        offload: Offload | None = None,
        param_groups: Sequence[ParamGroup] | None = None,
        model_state: ShardedStateDict | None = None,
        matrices: Mapping[torch.nn.Parameter, Matrix] | None = None,
    ) -> None:
        check_arguments(stages, zero_stage)
        if param_groups is None:
            param_groups = default_param_groups(stages, config, groups)
        trained = self._trained = TrainableParams(stages, param_groups, is_offloading=offload is not None)
        check_rows(trained.named, config)
        self.param_groups, self.parameters, self.device = param_groups, trained.parameters, trained.device
        self.config, self.groups = config, groups
        layout = flat_layout(trained, config, zero_stage, groups)
        for check in (check_gathers, check_on_host):
            check(layout.buffer_groups, is_offloading=offload is not None)
        self.is_sharded = layout.buffer_groups[0].stage.shards_states
        self.loss_scale = loss_scale_of(config, [buffer_group.dtype for buffer_group in layout.buffer_groups])
        self._clock = WaitClock(self.device)
        self._lr: float | Sequence[float] | None = None
        """The rates of the current step, or None between steps."""
        frozen = frozen_layout(layout, config, groups)
        params = self.param_buffer = ParamBuffer(layout, frozen, self._clock)
        grads = self.grad_buffer = GradBuffer(layout, config)
        draws = rng_coords_of(trained.named, model_state) if config.rounds_stochastically else None
        self._grad_norm = GradNorm(layout, grads.buckets, params, groups, draws)
        fixed_bytes = params.num_bytes + params.unit_bytes + grads.num_bytes
        self.adam = HybridAdam(self._grad_norm.shards, config, param_groups, offload, fixed_bytes)
        self._muon = Muon(layout, self._grad_norm, self.adam, config, matrices or {})
        self.schedule = StepSchedule(
            layout, params, grads, self.adam, self._grad_norm, groups.dp_cp, self._clock
        )
        ModelHooks(layout, params, grads.params, self.schedule)
        self.placement = self.adam.placement
        self.placement.before_move.append(self.start_param_sync)
        norm, main_dtype = self._grad_norm, torch_dtype(config.main_grads_dtype)
        self._states = ShardStates(
            "optimizer.state",
            self.adam.dtypes,
            lambda name: norm.state_ranges(partial(self.adam.state, name)),
            self.parameters,
        )
        self._gradients = ShardStates(
            "gradient", {"": main_dtype}, lambda _: norm.state_ranges(norm.gradients), self.parameters
        )

    def count_on(self, device: SimulatedDevice) -> None:
        """Let a simulated device count weights and gradients; sharded weights count while gathered.

        Raises:
            torch.OutOfMemoryError: the budget is too small for the weights and gradients.
        """
        device.reserve(self.placement.fixed_bytes - self.param_buffer.unit_bytes)
        self.param_buffer.count_units(device)

    def connect(self, model_config: ModelParallelConfig) -> None:
        """Set `no_sync_func` and `grad_scale_func` on the TransformerConfig for megatron-core."""
        model_config.no_sync_func = self.no_sync
        model_config.grad_scale_func = self.scale_loss

    def zero_grad(self, lr: float | Sequence[float]) -> None:
        """Drop the last step's gradients; call before the first backward of a step.

        Args:
            lr: rate of this step, for all parameter groups or one rate for each of `param_groups`.
        Raises:
            TrainingError: trainable parameters changed since construction, or the number of rates is wrong.
        """
        self._trained.check()
        self._lr = lr
        self.schedule.begin_step(lr, 1.0 / self.loss_scale.value)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss for backward, multiplied by the loss scale in fp16."""
        return self.loss_scale.apply(loss)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context for the backwards of all micro-batches but a step's last, as in torch's DDP."""
        return self.schedule.no_sync

    def start_grad_sync(self) -> None:
        """Start the remaining reductions after all backwards; later collectives are queued after them."""
        self.schedule.start_grad_sync()

    @torch.no_grad()
    def finish_grad_sync(self) -> None:
        """Wait for the gradient reductions; `step` calls it if the caller has not."""
        self.schedule.finish_grad_sync()

    @torch.no_grad()
    def step(self, *, skip_non_finite: bool = False) -> StepOutcome:
        """Update every shard with the final gradients, and start the all-gathers of the new parameters.

        The next forward, `state_dict` and `module.weight` wait for the new parameters. Other reads see old
        values until `finish_param_sync`. Non-finite gradients are detected before any write.

        Args:
            skip_non_finite: skip an update that a smaller loss scale cannot cure, instead of raising.
        Raises:
            TrainingError: the gradient norm is not finite and not skipped, or `zero_grad` was not called.
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
            raise _not_finite(self.adam.step_count + 1, grad_norm)
        self._lr = None
        return StepOutcome(grad_norm, not is_finite, is_overflow)

    @contextmanager
    def checking_local_gradients(self) -> Iterator[LocalCheck]:
        """Return a context for a trial backward that checks this rank's own gradients before reductions.

        Inside call `zero_grad`, run the micro-batches, and call `finish_grad_sync`. No update follows.
        """
        check = self.schedule.local_check = LocalCheck()
        try:
            yield check
        finally:
            self.schedule.local_check = None
            self.adam.cancel_step()
            self._lr = None

    @torch.no_grad()
    def start_grad_norm(self) -> None:
        """Start the norm of final gradients, so that the device works while the host waits for other values.

        Gradients must not change until `step`, which reads the norm.
        """
        self._grad_norm.start_total(self._norm_group)

    @torch.no_grad()
    def get_grad_norm(self) -> float:
        """Return the global L2 norm of the unscaled gradients of the whole model; each weight counts once.

        An infinity or NaN in any gradient makes the norm non-finite on every rank.
        """
        return self._grad_norm.grad_norm(self._norm_group) / self.loss_scale.value

    @property
    def _norm_group(self) -> dist.ProcessGroup | None:
        # With sharding all ranks hold different shards; otherwise only model-parallel ranks do.
        is_same = all(group.data_parallel_group in (None, self.groups.dp_cp) for group in self.param_groups)
        return self.groups.mp if is_same and not self.is_sharded else None

    def _update(self, grad_norm: float, lr: float | Sequence[float]) -> None:
        limit = self.config.clip_grad
        scale = (min(1.0, limit / (grad_norm + 1e-6)) if limit > 0 else 1.0) / self.loss_scale.value
        self.loss_scale.keep()
        self._muon.orthogonalize(scale)
        self.schedule.update(lr, scale)

    def abandon_backward(self, num_micro_batches: int) -> None:
        """After an error in forward or backward, start the collectives that other ranks still expect.

        All ranks must then repeat the step. `num_micro_batches` is the step's number on each rank. Only for
        ranks that hold the whole model.
        """
        self.schedule.abandon_backward(num_micro_batches)

    def materialize_frozen(self) -> None:
        """Fill frozen weights that have no values yet with zeros, unless ranks shard the weights."""
        for parameter in (p for stage in self._trained.stages for p in stage.parameters()):
            is_elsewhere = parameter.requires_grad or parameter in self.param_buffer.sharded
            if not (is_elsewhere or has_values(parameter)):
                parameter.data = parameter.new_zeros(parameter.shape)

    @property
    def gathers_in_forward(self) -> bool:
        """Return whether forward runs collectives, because weights are freed while no module needs them."""
        return bool(self.param_buffer.sharded)

    def start_param_sync(self) -> None:
        """Wait for this rank's updates, not for other ranks, and start the remaining all-gathers."""
        self.schedule.start_param_sync()

    def finish_param_sync(self) -> None:
        """Wait until every parameter has its new value; call before raw reads or writes of parameters."""
        self.schedule.finish_param_sync()
        self.adam.forget_host_weights()

    @contextmanager
    def full_weights(self, *, frozen: bool = True) -> Iterator[None]:
        """Return a context in which every parameter is whole, in its own dtype; a collective of the job.

        Outside of it, weights may be gathered in fp8, or freed while no module needs them. Open it before
        reading or writing the model's weights. Training continues from the written values, which must be
        equal on all ranks with the parameter. `frozen` includes frozen parameters. Nesting has no effect.
        """
        self.finish_param_sync()
        with self.param_buffer.whole(frozen=frozen):
            yield

    @contextmanager
    def meta_weights(self, *, to_write: bool = False) -> Iterator[UnitVisits | None]:
        """Return a context for making the model's sharded_state_dict, to save or to load; a collective.

        Inside it, sharded weights have shapes but no values: `sharded_weights` returns their values. Or
        visits make one unit of weights whole at a time, to read or (`to_write`) to write, so that no rank
        needs memory for all of them.

        Returns:
            a function from a weight, or a view of a weight, to its whole tensor, which is valid until the
            next call. All ranks must call it in the same order. None: all weights are whole.
        """
        self.finish_param_sync()
        with self.param_buffer.described(to_write=to_write) as visits:
            yield visits

    def sharded_weights(self, model_state: ShardedStateDict) -> ShardedStateDict:
        """Return the weights that this rank saves or loads; sharded weights as views of the rank's shards.

        `model_state` must be made within `meta_weights`.
        """
        return sharded_weights(model_state, *self.param_buffer.own_parts())

    def reload_model_params(self) -> None:
        """Continue from the model's current weights; call after loading them in any way but a resume."""
        self.finish_param_sync()
        self.param_buffer.store_whole()
        self.adam.copy_model_params_to_main_params()

    def report(self) -> OptimizerReport:
        """Report where states are on this rank, and the cost of offload."""
        return self.adam.report()

    def exposed_communication_ms(self) -> float:
        """Return the milliseconds that compute waited for gradients and parameters since the last call."""
        return self._clock.read_ms()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state for a resume, without the model's state_dict; call it on all ranks.

        It fits the same model, bucket size, number of ranks and ZeRO stage; `sharded_state_dict` fits any
        layout. "states" holds each state of this rank's shards, flat, on the CPU, beside
        `common_state_dict()`.
        """
        self.finish_param_sync()
        return {**self.common_state_dict(), "states": self._states.flat()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from the result of `state_dict` on this rank; the model loads its weights separately.

        Raises:
            CheckpointError: the states belong to different shards.
        """
        self.finish_param_sync()
        self._states.load_flat(state["states"])
        self.load_common_state_dict(state)

    def common_state_dict(self) -> dict[str, Any]:
        """Return the state that is the same on all ranks: the number of steps and the loss scale."""
        return {"optimizer_steps": self.adam.step_count, "loss_scale": self.loss_scale.state_dict()}

    def load_common_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from the result of `common_state_dict`; other entries of `state` are ignored."""
        self.adam.step_count = state["optimizer_steps"]
        self.loss_scale.load_state_dict(state["loss_scale"])

    def sharded_state_dict(
        self, model_state: ShardedStateDict, *, is_loading: bool = False
    ) -> ShardedStateDict:
        """Return states as sharded tensors of the weights' global shapes, for any DP, TP, PP and bucket size.

        They are views: loading into them loads the optimizer. Bits that masters share with weights (all bits
        in fp32, the high bits in bf16) are left to the model's state.

        Args:
            model_state: the model's sharded_state_dict, whose entries hold the parameters themselves.
            is_loading: leave out the zeros that fill up states of partly frozen layers.
        """
        return self._states.sharded(model_state, is_loading=is_loading)

    def sharded_gradients(self, model_state: ShardedStateDict) -> ShardedStateDict:
        """Return the last step's gradients as views, valid until `zero_grad`; keys begin with `gradient.`.

        They are not clipped, and are multiplied by the loss scale. `model_state`: see `sharded_state_dict`.
        A collective of the job.
        """
        return self._gradients.sharded(model_state, is_loading=False)


def _not_finite(step: int, grad_norm: float) -> TrainingError:
    return TrainingError(
        f"optimizer step {step}: gradient norm {grad_norm}, expected a finite number; the weights are those "
        "of the step before. Lower --lr, raise --lr-warmup-iters, or look at this step's data"
    )
