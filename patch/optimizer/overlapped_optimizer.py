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
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.config.choices import ZeroStage
from patch.config.schema import OptimizerConfig
from patch.distributed.async_collectives import Pending, WaitClock
from patch.errors import TrainingError
from patch.memory import SimulatedDevice
from patch.optimizer.domain import check_on_host, flat_layout, frozen_layout
from patch.optimizer.eight_bit_flat import check_gathers
from patch.optimizer.grad_buffer import GradBuffer, LocalCheck
from patch.optimizer.hybrid_adam import HybridAdam, OptimizerReport
from patch.optimizer.loss_scale import loss_scale_of
from patch.optimizer.offload import Offload
from patch.optimizer.own_shards import OwnShards
from patch.optimizer.param_buffer import ParamBuffer
from patch.optimizer.param_groups import ParamGroup, default_param_groups
from patch.optimizer.param_reads import ParamReads
from patch.optimizer.param_units import ParamUnits
from patch.optimizer.sharded_flat import UnitVisits, has_values
from patch.optimizer.sharded_state import ShardStates, draws_of, sharded_ranges, sharded_weights
from patch.optimizer.trained import TrainedParameters, check_arguments, check_rows


class StepOutcome(NamedTuple):
    """The outcome of `step`."""

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
        model_state: the model's sharded_state_dict, which says what parts of weights parameters are.
    Raises:
        ConfigError: other arguments than these; parameters that it cannot train (`TrainedParameters`).
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
    ) -> None:
        check_arguments(stages, zero_stage)
        if param_groups is None:
            param_groups = default_param_groups(stages, config, groups)
        trained = self._trained = TrainedParameters(stages, param_groups, is_offloading=offload is not None)
        check_rows(trained.named, config)
        self.param_groups, self.parameters, self.device = param_groups, trained.parameters, trained.device
        self.config, self.groups = config, groups
        layout = flat_layout(trained, config, zero_stage, groups)
        for check in (check_gathers, check_on_host):
            check(layout.domains, is_offloading=offload is not None)
        self.is_sharded = layout.domains[0].sharding.shares_states
        self.loss_scale = loss_scale_of(config, [domain.dtype for domain in layout.domains])
        self._clock = WaitClock(self.device)
        self._is_grad_synced = False
        self._lr: float | Sequence[float] | None = None
        """The rates of the step that has begun; None: none has."""
        frozen = frozen_layout(layout, config, groups)
        self.param_buffer = ParamBuffer(
            layout, frozen, lambda index, block: self.adam.wait_for_update(index, block=block), self._clock
        )
        units = self._units = ParamUnits(
            layout, frozen, self.param_buffer, self._clock,
            before_forward=lambda: self.grad_buffer.check_micro_batches(),
            on_passed=lambda buckets: self.grad_buffer.end_buckets(buckets),
        )  # fmt: skip
        ParamReads(layout, self.param_buffer, units)
        self.grad_buffer = GradBuffer(
            layout, config, groups.dp_cp, self._clock,
            on_backward=self._on_backward, on_collected=units.collected, on_end=units.end_backward,
            on_final=self._on_final_gradient,
        )  # fmt: skip
        draws = draws_of(trained.named, model_state) if config.is_drawing else None
        self._own = OwnShards(
            self.parameters, layout.specs, self.grad_buffer.buckets, self.param_buffer, groups, self.device,
            draws,
        )
        fixed_bytes = self.param_buffer.num_bytes + units.num_bytes + self.grad_buffer.num_bytes
        self.adam = HybridAdam(self._own.shards, config, param_groups, offload, fixed_bytes)
        self.placement = self.adam.placement
        self.placement.before_move.append(self.start_param_sync)
        self._states = ShardStates(
            self.adam.dtypes,
            lambda name: self._own.state_ranges(partial(self.adam.state, name)),
            self.adam.state_dtypes,
            self.parameters,
        )

    def _on_backward(self, stage: int) -> None:
        self.param_buffer.finish_before_backward()
        self._units.begin_backward(stage)

    def _on_final_gradient(self, index: int, after: Pending | None) -> None:
        self.adam.grad_ready(index, after)
        if after is None and self.device.type == "cpu":  # a GPU computes all norms at the end, at one go
            self._own.start_norm(index)

    def count_on(self, device: SimulatedDevice) -> None:
        """Let a simulated device count weights and gradients, those that come and go while they are here.

        Raises:
            torch.OutOfMemoryError: it has no room for them.
        """
        device.reserve(self.placement.fixed_bytes - self._units.num_bytes)
        self.param_buffer.count_units(device)

    def connect(self, model_config: ModelParallelConfig) -> None:
        """Set `no_sync_func` and `grad_scale_func` on the TransformerConfig, where megatron-core looks."""
        model_config.no_sync_func = self.no_sync
        model_config.grad_scale_func = self.scale_loss

    def zero_grad(self, lr: float | Sequence[float]) -> None:
        """Forget the last step's gradients; call before the first backward of a step.

        Args:
            lr: rate of this step; for all parameter groups, or one for each of `param_groups`.
        Raises:
            TrainingError: the trainable parameters are not those of the construction, or the rates are not as
                many as the groups.
        """
        self._trained.check()
        self._units.begin_step()
        self.param_buffer.leave_whole()
        self._lr, self._is_grad_synced = lr, False
        self.grad_buffer.reset()
        self._own.forget_norms()
        self.adam.start_step(lr, 1.0 / self.loss_scale.value)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss for backward, multiplied by the loss scale in fp16."""
        return self.loss_scale.apply(loss)

    def no_sync(self) -> AbstractContextManager[None]:
        """Context of the backwards of all micro-batches but a step's last one, as in torch's DDP."""
        return self.grad_buffer.micro_batches.no_sync()

    def start_grad_sync(self) -> None:
        """Start the reductions that are left; call when all backwards are done.

        Messages that this rank sends afterwards travel behind them.
        """
        self.param_buffer.start_gathers_of_others()
        self.grad_buffer.start_grad_sync()
        self._units.end_pass()

    @torch.no_grad()
    def finish_grad_sync(self) -> None:
        """Wait for the gradient reductions; `step` calls it if you have not."""
        if self._is_grad_synced:
            return
        self.param_buffer.start_gathers_of_others()
        self.grad_buffer.finish_grad_sync()
        self._units.end_pass()
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
            raise _not_finite(self.adam.step_count + 1, grad_norm)
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
        is_same = all(group.data_parallel_group in (None, self.groups.dp_cp) for group in self.param_groups)
        group = self.groups.mp if is_same and not self.is_sharded else None
        return self._own.grad_norm(group) / self.loss_scale.value

    def _update(self, grad_norm: float, lr: float | Sequence[float]) -> None:
        limit = self.config.clip_grad
        scale = (min(1.0, limit / (grad_norm + 1e-6)) if limit > 0 else 1.0) / self.loss_scale.value
        self.loss_scale.keep()
        self.adam.start_update(lr, scale)
        self.param_buffer.update_in_turns(self.adam.update)

    def abandon_backward(self, num_micro_batches: int) -> None:
        """An error ended forward or backward of a step: send what the other ranks expect all the same.

        The step is to be begun again, by all of them. For ranks that hold the whole model.

        Args:
            num_micro_batches: how many the step has on each rank.
        """
        self.finish_param_sync()
        for parameter in self.parameters:
            parameter.grad = None  # one that its bucket had no memory for
        self._units.end_pass()
        self.grad_buffer.abandon_backward(num_micro_batches)

    def give_frozen_memory(self) -> None:
        """Give zeros to frozen weights that have no values yet, and that nobody shares."""
        for parameter in (p for stage in self._trained.stages for p in stage.parameters()):
            if not (parameter.requires_grad or self._units.flats_of([parameter]) or has_values(parameter)):
                parameter.data = parameter.new_zeros(parameter.shape)

    @property
    def gathers_in_forward(self) -> bool:
        """Whether forward sends messages: weights are freed while no module needs them."""
        return self._units.are_there

    def start_param_sync(self) -> None:
        """Wait for this rank's updates, and start the gathers that are left; wait for no other rank."""
        self.param_buffer.start_all_gathers()

    def finish_param_sync(self) -> None:
        """Wait until every parameter has its new value; call before reading parameters raw."""
        self.param_buffer.finish_param_sync()

    def full_weights(self, *, frozen: bool = True) -> AbstractContextManager[None]:
        """Context in which every parameter has its new value in its own type; a collective over the job.

        Outside of it weights may be gathered in 8 bits, or freed while no module needs them. Whoever reads or
        writes the model's weights opens it. What was written, the same on all ranks that hold a parameter, is
        what training goes on from. Contexts inside it change nothing.

        Args:
            frozen: also those that are not trained.
        """
        return self.param_buffer.whole(frozen=frozen)

    def described_weights(self, *, to_write: bool = False) -> AbstractContextManager[UnitVisits | None]:
        """Context in which the model's sharded_state_dict may be made, to save or to load; a collective.

        In it weights of which ranks keep shards have shapes and no values: `sharded_weights` has these. Or
        weights are visited one after the other, for which no rank needs memory for all.

        Args:
            to_write: who visits weights writes them, instead of reading them.
        Returns:
            gives for a weight, or a view of one, where it is whole until the next is asked for, on all ranks
            in one order; None: all are whole.
        """
        return self.param_buffer.described(to_write=to_write)

    def sharded_weights(self, model_state: ShardedStateDict) -> ShardedStateDict:
        """The weights that this rank saves or loads: views of its shards if it keeps no more.

        Args:
            model_state: the model's sharded_state_dict, made within `described_weights`.
        """
        return sharded_weights(model_state, *self.param_buffer.own_parts())

    def reload_model_params(self) -> None:
        """Go on from the weights that the model has now; call after loading them in any way but a resume."""
        self.finish_param_sync()
        self.param_buffer.store_whole()
        self.adam.copy_model_params_to_main_params()

    def report(self) -> OptimizerReport:
        """Where states lie on this rank now, and what that costs."""
        return self.adam.report()

    def exposed_communication_ms(self) -> float:
        """Milliseconds that compute waited for gradients and parameters since the last call."""
        return self._clock.read_ms()

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank for a resume, beside the model's state_dict; call it on all ranks.

        It fits the same model, bucket size, number of ranks and ZeRO stage; `sharded_state_dict` fits any.

        Returns:
            `common_state_dict()` and "states": each state of this rank's shards, flat, on the CPU.
        """
        self.finish_param_sync()
        return {**self.common_state_dict(), "states": self._states.flat()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned on this rank; the model loads its weights by itself.

        Raises:
            CheckpointError: the states are those of other shards.
        """
        self.finish_param_sync()
        self._states.load_flat(state["states"])
        self.load_common_state_dict(state)

    def common_state_dict(self) -> dict[str, Any]:
        """The state that is the same on all ranks: the number of steps and the loss scale."""
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
        return self._states.sharded(model_state, is_loading=is_loading)

    def sharded_gradients(self, model_state: ShardedStateDict) -> ShardedStateDict:
        """The last step's gradients, not clipped, times the loss scale; keys begin with `gradient.`.

        They are views, valid until `zero_grad`.

        Args:
            model_state: see `sharded_state_dict`.
        """
        return sharded_ranges(model_state, self._own.state_ranges(self._own.gradients), "gradient.")


def _not_finite(step: int, grad_norm: float) -> TrainingError:
    return TrainingError(
        f"optimizer step {step}: gradient norm {grad_norm}, expected a finite number; the weights are those "
        "of the step before. Lower --lr, raise --lr-warmup-iters, or look at this step's data"
    )
