"""Experts: megatron-core's MoELayer with our products and activation, and a router that counts.

    router          scores and choices are megatron-core's, in float32; the divisor of its losses is ours
    dispatcher      megatron-core's, which sends tokens to ranks and back; or one of ours, with fewer waits
    experts         megatron-core's SequentialMLP; all experts of a rank are one operation
    shared expert   megatron-core's, with the activation of our MLP

A rank's tokens are [S, B, H]. Weights, names and checkpoint keys of an expert are megatron-core's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from patch.compat.torch_internals import own_parameters
from patch.model.experts.grouped import (
    MOST_SINGLE,
    SIZES,
    GroupedExperts,
    activation_backward,
    weighted_activation,
)
from patch.model.linear import PLAIN
from patch.model.mlp import Activation, through_layers
from patch.model.weight_gradient import weight_gradient

EXTRA_STATS = ("dropped", "aux_loss", "z_loss")
"""Values that a router counts besides the load of each expert."""


class GroupLimitedTopK:
    """DeepSeek's choice of expert groups, as a router replay of megatron-core.

    A token uses experts of the groups whose largest scores have the largest sum: one score of each group in
    DeepSeek-V2 (arXiv:2405.04434, 2.2.3), two in DeepSeek-V3, whose scores are sigmoids. megatron-core sums
    top-k / groups scores, which is two in DeepSeek-V3's own sizes alone (moe_utils.py:515-560).
    """

    def __init__(self, score_function: str, *, is_sorted: bool = True) -> None:
        self._best, self._is_sorted = 2 if score_function == "sigmoid" else 1, is_sorted

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int, *unused: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the largest scores [tokens, topk] of [tokens, experts], and their experts."""
        if num_groups is None:
            return scores.topk(topk, sorted=self._is_sorted)
        of_groups = scores.unflatten(1, (num_groups, -1))
        chosen = of_groups.detach().topk(self._best).values.sum(-1).topk(group_topk).indices
        others = torch.ones_like(of_groups[..., 0], dtype=torch.bool).scatter_(1, chosen, False)
        return (
            of_groups.masked_fill(others[..., None], float("-inf"))
            .flatten(1)
            .topk(topk, sorted=self._is_sorted)
        )


class Router(TopKRouter):
    """megatron-core's router with losses that are means over a step, added to the mean loss of tokens.

    megatron-core multiplies the losses by the number of tokens, because it divides after backward
    (router.py:456-466, 488-498). Here `share`, 1 / (micro-batches of the step over all replicas), divides a
    loss before backward. Micro-batches, and the parts of ranks, have equal sizes. So the mean of a loss per
    token or per row does not depend on the split of a batch. The mean of `aux_loss` does, because it is a
    product of two means over a micro-batch.
    """

    router_replay: Any
    """The object that chooses the experts, or None if megatron-core's own rule does."""

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        *,
        share: float,
        is_mtp_layer: bool = False,  # passed by megatron-core 0.17 and later
    ) -> None:
        assert not is_mtp_layer, "multi-token prediction is not supported"
        super().__init__(config, pg_collection)
        self._share = share
        if config.moe_router_group_topk:
            self.router_replay = GroupLimitedTopK(config.moe_router_score_function)
        counts = torch.zeros(config.num_moe_experts + len(EXTRA_STATS), dtype=torch.float64)
        self.register_buffer("counts", counts, persistent=False)
        """In a step: the tokens that this rank sent to each expert. Then EXTRA_STATS: dropped choices, and
        this rank's parts of the losses without their factors."""

    def routing(self, logits: torch.Tensor, padding_mask: None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights and choices, both [tokens, experts], from logits [S, B, experts]."""
        weights, choices = super().routing(logits, padding_mask)
        if self.training and torch.is_grad_enabled():  # once: recomputed layers first run without gradients
            loads = choices.sum(0)
            self.counts[: len(loads)] += loads
            self._note("dropped", len(choices) * self.topk - loads.sum())
        return weights, choices

    def _apply_expert_bias(self, *unused: Any, **named: Any) -> None:
        """Do nothing: `counts` has the loads, and `update_expert_biases` uses them."""

    def _apply_aux_loss(
        self, probs: torch.Tensor, scores: torch.Tensor, routing_map: torch.Tensor, **named: Any
    ) -> torch.Tensor:
        return super()._apply_aux_loss(probs, scores, self._chosen(scores, routing_map), **named)

    def _apply_seq_aux_loss(
        self, probs: torch.Tensor, scores: torch.Tensor, routing_map: torch.Tensor, *sizes: int, **named: Any
    ) -> torch.Tensor:
        return super()._apply_seq_aux_loss(probs, scores, self._chosen(scores, routing_map), *sizes, **named)

    def _chosen(self, scores: torch.Tensor, without_groups: torch.Tensor) -> torch.Tensor:
        """Return the choices [tokens, experts] before drops. megatron-core's losses ignore expert groups.

        So does the loss of DeepSeek-V3, which also ignores the bias (arXiv:2412.19437, equation 18).
        """
        groups, chosen = self.config.moe_router_num_groups, self.config.moe_router_group_topk
        if not groups or not chosen or self.score_function == "sigmoid":
            return without_groups
        indices = GroupLimitedTopK(self.score_function).get_replay_topk(scores, self.topk, groups, chosen)[1]
        return torch.zeros_like(without_groups).scatter_(1, indices, True)

    def attach_and_log_load_balancing_loss(
        self,
        activation: torch.Tensor,
        aux_loss_coeff: float,
        aux_loss: torch.Tensor,
        *unused: Any,
        **named: Any,
    ) -> torch.Tensor:
        """Return the activation; its backward also starts the backward of the loss (with its coefficient)."""
        self._note("aux_loss", aux_loss / aux_loss_coeff)
        return MoEAuxLossAutoScaler.apply(activation, aux_loss * self._share)

    def apply_z_loss(self, logits: torch.Tensor, padding_mask: None = None) -> torch.Tensor:
        """Return the logits [tokens, experts]; their backward also starts the backward of the loss."""
        factor = self.config.moe_z_loss_coeff
        if factor is None or not (self.training and torch.is_grad_enabled()):
            return logits
        loss = logits.logsumexp(-1).square().mean() / self.tp_cp_group.size()
        self._note("z_loss", loss)
        return MoEAuxLossAutoScaler.apply(logits, loss * (factor * self._share))

    def _note(self, name: str, value: torch.Tensor) -> None:
        scale = 1 if name == "dropped" else self._share
        self.counts[EXTRA_STATS.index(name) - len(EXTRA_STATS)] += value.detach() * scale


def routers_of(stages: Sequence[torch.nn.Module]) -> Iterator[Router]:
    """Return the routers of a rank's stages, layer by layer."""
    return (module for stage in stages for module in stage.modules() if isinstance(module, Router))


@torch.no_grad()
def update_expert_biases(stages: Sequence[torch.nn.Module]) -> None:
    """Move the biases of a rank's routers by the loads of the global batch (arXiv:2408.15664, algorithm 1).

    Call it after an optimizer step; a collective over the ranks of a pipeline stage. The bias of an expert
    below the mean load grows by --moe-router-bias-update-rate, that of one above it shrinks. Counts are
    exact, so the bits do not depend on layout and micro-batch size. A frozen router keeps its bias.
    """
    # The weight may be sharded; its values are not read.
    trained = (each for each in routers_of(stages) if own_parameters(each)["weight"].requires_grad)
    routers = [each for each in trained if each.enable_expert_bias]
    if not routers or not routers[0].config.moe_router_bias_update_rate:
        return
    loads = torch.stack([each.counts[: -len(EXTRA_STATS)] for each in routers])
    torch.distributed.all_reduce(loads, group=routers[0].tp_dp_cp_group)
    steps = torch.sign(loads.mean(-1, keepdim=True) - loads) * routers[0].config.moe_router_bias_update_rate
    for router, step in zip(routers, steps, strict=True):
        router.expert_bias += step.to(router.expert_bias.dtype)


class ExpertsLayer(MoELayer):
    """megatron-core's layer; our dispatchers route the tokens if none is dropped."""

    def __init__(self, *arguments: Any, pg_collection: ProcessGroupCollection, **named: Any) -> None:
        super().__init__(*arguments, pg_collection=pg_collection, **named)
        if self.config.moe_expert_capacity_factor is not None:
            return
        is_local = pg_collection.tp_ep.size() == 1
        self.experts.are_sizes_on_host = not is_local
        if is_local or self.config.moe_token_dispatcher_type == "alltoall":
            kind = LocalDispatcher if is_local else AllToAllDispatcher
            self.token_dispatcher = kind(
                self.num_local_experts, self.local_expert_indices, self.config, pg_collection
            )

    def route(
        self, hidden_states: torch.Tensor, padding_mask: None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Router.routing. For grouped products the experts of each rank are in reverse order."""
        found = super().route(hidden_states, padding_mask)
        if not self.experts.is_grouped:
            return found
        weights, choices = (
            of_experts.unflatten(1, (-1, self.num_local_experts)).flip(2).flatten(1) for of_experts in found
        )
        return weights, choices


class LocalDispatcher(MoEAllGatherTokenDispatcher):
    """Dispatcher of a rank that has all experts: no communication, and the host does not wait.

    megatron-core's dispatchers make the host wait for the rows of each expert, and twice for their sum.
    """

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rows [T, H] sorted by expert, rows per expert [experts] and weights [T], on the device."""
        self.hidden_shape_before_permute, self.local_map = hidden_states.shape, self.routing_map
        self.reversed_local_input_permutation_mapping, rows, weights = _sorted_by_expert(
            hidden_states, self.routing_map, probs, self.router_topk
        )
        return rows, self.routing_map.sum(0), weights


class AllToAllDispatcher(MoEAlltoAllTokenDispatcher):
    """megatron-core's dispatcher; the host waits once for the rows of each expert, and not for their sum."""

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows [T, H] sorted by expert and their weights [T], for the all-to-all."""
        assert self.shared_experts is None and not self.config.moe_router_padding_for_quantization
        self.hidden_shape, self.probs, self.routing_map = hidden_states.shape, probs, routing_map
        hidden_states = hidden_states.view(-1, self.hidden_shape[-1])
        self.hidden_shape_before_permute = hidden_states.shape
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize(
            "before_permutation_1", self.preprocess(routing_map)
        )
        self.reversed_local_input_permutation_mapping, rows, weights = _sorted_by_expert(
            hidden_states, routing_map, probs, self.config.moe_router_topk
        )
        return rows, weights


def _sorted_by_expert(
    tokens: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor, topk: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the token of each row, int64 [T * topk], the rows and their weights, sorted by expert.

    Each token has `topk` experts, so the host does not wait for the number of rows, as masked_select
    (moe_utils.py:369-372) makes it.

    Args:
        tokens: [T, H].
        choices, weights: [T, experts].
    """
    places = choices.t().flatten().nonzero_static(size=len(tokens) * topk)[:, 0]
    of_rows = places % len(tokens)
    return of_rows, tokens.index_select(0, of_rows), weights.t().flatten().index_select(0, places)


class LocalExperts(SequentialMLP):
    """The experts of a layer on this rank; backward keeps the tokens and the outputs of the first layers.

    With `is_grouped`, grouped products are used if the widths allow it; experts are then in reverse order.
    """

    def __init__(self, *arguments: Any, activate: Activation, is_grouped: bool, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._activate = activate
        sizes = [size for weight in self.local_experts[0].parameters() for size in weight.shape]
        is_one = len(self.local_experts) == 1  # a plain product is faster, and its gradient is not rounded
        self.is_grouped = is_grouped and not is_one and not any(size % SIZES for size in sizes)
        self.are_sizes_on_host = False
        """Whether the dispatcher has brought the rows per expert to the host."""
        for parameter in self.parameters():
            parameter.contiguous_with = id(self)  # type: ignore[attr-defined]  # see TrainableParams.specs

    def forward(
        self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Return the results of the experts, each times its weight, [T, H], and no bias.

        `tokens` [T, H] are sorted by expert. `weights` [T] come from the router.
        """
        layers = (self.local_experts[0].linear_fc1, self.local_experts[0].linear_fc2)
        if any(layer.product is not PLAIN or any(layer.children()) for layer in layers):
            assert not self.is_grouped, "the backends do not choose it"
            return self._one_by_one(tokens, weights, tokens_per_expert.tolist()), None
        experts = [*self.local_experts]
        if self.is_grouped:
            experts.reverse()
        matrices = [expert.linear_fc1.weight for expert in experts]
        matrices += [expert.linear_fc2.weight for expert in experts]
        if self.is_grouped and len(tokens):
            on_device = tokens_per_expert.to(tokens.device, non_blocking=True)
            ends = on_device.cumsum(0, dtype=torch.int32)
            is_known = self.are_sizes_on_host and len(experts) <= MOST_SINGLE
            sizes = tokens_per_expert.tolist() if is_known else None
            return GroupedExperts.apply(tokens, weights, ends, sizes, self._activate, *matrices), None
        return _Experts.apply(tokens, weights, tokens_per_expert.tolist(), self._activate, *matrices), None

    def _one_by_one(self, tokens: torch.Tensor, weights: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """Run the experts' own layers, which are more than a plain product; backward keeps more."""
        results = []
        parts = zip(self.local_experts, tokens.split(sizes), weights.split(sizes), strict=True)
        for expert, own, weight in parts:
            hidden, _ = expert.linear_fc1(own)
            active = self._activate(hidden) * weight.unsqueeze(-1)
            results.append(expert.linear_fc2(active.to(hidden.dtype))[0])
        return torch.cat(results)


class _Experts(torch.autograd.Function):
    """(activate(tokens @ first.T) * weight) @ second.T for each expert, with the bits of single products."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: torch.Tensor,
        weights: torch.Tensor,
        sizes: list[int],
        activate: Activation,
        *matrices: torch.Tensor,
    ) -> torch.Tensor:
        hidden, output = tokens.new_empty(len(tokens), len(matrices[0])), torch.empty_like(tokens)
        for rows, experts, of_experts in _parts(sizes, tokens.is_cuda):
            first, second = matrices[: len(sizes)][experts], matrices[len(sizes) :][experts]
            _multiply(tokens[rows], [each.t() for each in first], of_experts, hidden[rows])
            active = weighted_activation(hidden[rows], weights[rows], activate)
            _multiply(active, [each.t() for each in second], of_experts, output[rows])
        ctx.sizes, ctx.activate, ctx.matrices = sizes, activate, matrices
        ctx.save_for_backward(tokens, weights, hidden, *matrices)
        return output

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        tokens, weights, hidden, *matrices = ctx.saved_tensors
        number, of_matrices = len(ctx.sizes), list[Any]([None] * len(matrices))
        of_tokens, of_weights = torch.empty_like(tokens), torch.empty_like(weights)
        for rows, experts, sizes in _parts(ctx.sizes, tokens.is_cuda):
            of_active = hidden.new_empty(len(gradient[rows]), matrices[-1].shape[1])
            _multiply(gradient[rows], matrices[number:][experts], sizes, of_active)
            of_hidden, active = activation_backward(
                hidden[rows], weights[rows], of_active, ctx.activate, of_weights[rows]
            )
            _multiply(of_hidden, matrices[:number][experts], sizes, of_tokens[rows])
            places = range(number)[experts]
            pairs = (
                (places, of_hidden, tokens[rows]),
                ([number + place for place in places], gradient[rows], active),
            )
            for indices, of_output, input in pairs:
                each = zip(indices, of_output.split(sizes), input.split(sizes), strict=True)
                for index, own, its_input in each:
                    if ctx.needs_input_grad[4 + index]:
                        of_matrices[index] = weight_gradient(ctx.matrices[index], own, its_input)
        return of_tokens, of_weights, None, None, *of_matrices


def _parts(sizes: list[int], is_cuda: bool) -> Iterator[tuple[slice, slice, list[int]]]:
    """Yield rows, experts and rows per expert: on a CPU for each expert, for its cache; on a GPU for all."""
    if is_cuda:
        yield slice(None), slice(None), sizes
        return
    end = 0
    for index, size in enumerate(sizes):
        begin, end = end, end + size
        yield slice(begin, end), slice(index, index + 1), [size]


def _multiply(
    rows: torch.Tensor, matrices: Sequence[torch.Tensor], sizes: list[int], output: torch.Tensor
) -> None:
    for own, matrix, result in zip(rows.split(sizes), matrices, output.split(sizes), strict=True):
        torch.mm(own, matrix, out=result)


class SharedExpert(SharedExpertMLP):
    """megatron-core's shared expert; a gate weights its output per token, if the model has one."""

    def __init__(self, *arguments: Any, activate: Activation, is_recomputed: bool, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._activate, self._is_recomputed = activate, is_recomputed

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[S, B, H] in and out."""
        output, _ = through_layers(self, hidden_states, self._activate, is_recomputed=self._is_recomputed)
        if self.gate_weight is not None:
            output = output * linear(hidden_states, self.gate_weight).sigmoid()
        return output
