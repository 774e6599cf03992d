"""Experts: upstream's MoELayer with our products and activation, and a router that counts.

    router          scores and choices are upstream's, in float32; its losses have this project's divisor
    dispatcher      upstream's: which tokens go to which rank, and back; or LocalDispatcher
    experts         upstream's SequentialMLP; all experts of a rank are one operation
    shared expert   upstream's, whose activation is that of our MLP

A rank's tokens are [S, B, H]. An expert's weights, names and places in a checkpoint are upstream's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from patch.model.four_bit_product import FOUR_BITS
from patch.model.grouped_experts import SIZES, GroupedExperts, activation_backward, weighted_activation
from patch.model.mlp import Activation, LayerPart, through_layers
from patch.model.weight_gradient import weight_gradient

FURTHER_COUNTS = ("dropped", "aux_loss", "z_loss")
"""Values that a router counts beside the load of each expert."""


class LikeliestGroups:
    """Groups of experts by DeepSeek-V2's rule (arXiv:2405.04434, 2.2.3), where upstream asks for a replay.

    A token visits experts of the groups whose largest scores are the largest. Upstream's own rule, that of
    DeepSeek-V3, is another: the sum of the largest scores (moe_utils.py:515-560).

    Args:
        is_sorted: whether a token's experts come by their scores.
    """

    def __init__(self, *, is_sorted: bool = True) -> None:
        self._is_sorted = is_sorted

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int, *unused: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest scores [tokens, topk] of [tokens, experts], and their experts."""
        if num_groups is None:
            return scores.topk(topk, sorted=self._is_sorted)
        of_groups = scores.unflatten(1, (num_groups, -1))
        chosen = of_groups.amax(-1).topk(group_topk).indices
        others = torch.ones_like(of_groups[..., 0], dtype=torch.bool).scatter_(1, chosen, False)
        return (
            of_groups.masked_fill(others[..., None], float("-inf"))
            .flatten(1)
            .topk(topk, sorted=self._is_sorted)
        )


class Router(TopKRouter):
    """Upstream's router; the losses of a step are means over its tokens, added to the mean loss of tokens.

    Upstream makes these losses larger by the number of tokens, for a division after backward
    (router.py:456-466, 488-498). Here a loss is divided before backward. Micro-batches, and ranks' parts of
    them, are of equal size. So the mean of the loss of a token, or of a row, does not depend on how a batch
    is divided; that of `aux_loss`, a product of two means over a micro-batch, does.

    Args:
        config: upstream's. pg_collection: the process groups.
        share: of a micro-batch in its step: 1 / (micro-batches of the step over all replicas).
    """

    router_replay: Any
    """The object that upstream asks which experts are chosen; None: it chooses itself."""

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        *,
        share: float,
        is_mtp_layer: bool = False,  # megatron-core 0.17 and later tell
    ) -> None:
        assert not is_mtp_layer, "there is no multi-token prediction here"
        super().__init__(config, pg_collection)
        self._share = share
        if config.moe_router_group_topk:
            self.router_replay = LikeliestGroups()
        counts = torch.zeros(config.num_moe_experts + len(FURTHER_COUNTS), dtype=torch.float64)
        self.register_buffer("counts", counts, persistent=False)
        """In a step: tokens that this rank sent to each expert, and then FURTHER_COUNTS: choices without
        a place at an expert, and this rank's parts of the losses, without their factors."""

    def routing(self, logits: torch.Tensor, padding_mask: None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and choices, both [tokens, experts], of logits [S, B, experts]."""
        weights, choices = super().routing(logits, padding_mask)
        if self.training and torch.is_grad_enabled():  # recomputed layers compute twice, once with gradients
            loads = choices.sum(0)
            self.counts[: len(loads)] += loads
            self._note("dropped", len(choices) * self.topk - loads.sum())
        return weights, choices

    def _apply_aux_loss(
        self, probs: torch.Tensor, scores: torch.Tensor, routing_map: torch.Tensor, **named: Any
    ) -> torch.Tensor:
        return super()._apply_aux_loss(probs, scores, self._chosen(scores, routing_map), **named)

    def _apply_seq_aux_loss(
        self, probs: torch.Tensor, scores: torch.Tensor, routing_map: torch.Tensor, *sizes: int, **named: Any
    ) -> torch.Tensor:
        return super()._apply_seq_aux_loss(probs, scores, self._chosen(scores, routing_map), *sizes, **named)

    def _chosen(self, scores: torch.Tensor, without_groups: torch.Tensor) -> torch.Tensor:
        """The choices [tokens, experts] before any are dropped; upstream's losses forget the groups."""
        groups, chosen = self.config.moe_router_num_groups, self.config.moe_router_group_topk
        if not groups or not chosen:
            return without_groups
        indices = LikeliestGroups().get_replay_topk(scores, self.topk, groups, chosen)[1]
        return torch.zeros_like(without_groups).scatter_(1, indices, True)

    def attach_and_log_load_balancing_loss(
        self,
        activation: torch.Tensor,
        aux_loss_coeff: float,
        aux_loss: torch.Tensor,
        *unused: Any,
        **named: Any,
    ) -> torch.Tensor:
        """The activation, whose backward also begins that of the loss, which has its factor already."""
        self._note("aux_loss", aux_loss / aux_loss_coeff)
        return MoEAuxLossAutoScaler.apply(activation, aux_loss * self._share)

    def apply_z_loss(self, logits: torch.Tensor, padding_mask: None = None) -> torch.Tensor:
        """The logits [tokens, experts], whose backward also begins that of their loss."""
        factor = self.config.moe_z_loss_coeff
        if factor is None or not (self.training and torch.is_grad_enabled()):
            return logits
        loss = logits.logsumexp(-1).square().mean() / self.tp_cp_group.size()
        self._note("z_loss", loss)
        return MoEAuxLossAutoScaler.apply(logits, loss * (factor * self._share))

    def _note(self, name: str, value: torch.Tensor) -> None:
        scale = 1 if name == "dropped" else self._share
        self.counts[FURTHER_COUNTS.index(name) - len(FURTHER_COUNTS)] += value.detach() * scale


def routers_of(stages: Sequence[torch.nn.Module]) -> Iterator[Router]:
    """The routers of a rank's stages, layer by layer."""
    return (module for stage in stages for module in stage.modules() if isinstance(module, Router))


class ExpertsLayer(MoELayer):
    """Upstream's layer; a rank that has all experts of it has a dispatcher of ours, if no token is dropped.

    Args:
        arguments, named: those of MoELayer.
    """

    def __init__(self, *arguments: Any, pg_collection: ProcessGroupCollection, **named: Any) -> None:
        super().__init__(*arguments, pg_collection=pg_collection, **named)
        if pg_collection.tp_ep.size() == 1 and self.config.moe_expert_capacity_factor is None:
            self.token_dispatcher = LocalDispatcher(
                self.num_local_experts, self.local_expert_indices, self.config, pg_collection
            )

    def route(
        self, hidden_states: torch.Tensor, padding_mask: None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Router.routing; for grouped products the experts of each rank in reverse order."""
        found = super().route(hidden_states, padding_mask)
        if not self.experts.is_grouped:
            return found
        weights, choices = (
            of_experts.unflatten(1, (-1, self.num_local_experts)).flip(2).flatten(1) for of_experts in found
        )
        return weights, choices


class LocalDispatcher(MoEAllGatherTokenDispatcher):
    """Dispatcher of a rank that has all experts: it sends no messages, and the host waits for nothing.

    Of all tokens each is chosen for equally many experts. Upstream's dispatchers ask the device how many rows
    that makes (masked_select in moe_utils.py:369-372), and for the number of each expert's.
    """

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows [T, H] sorted by expert, numbers of each expert's [experts] and weights [T], on the device."""
        num_tokens = len(hidden_states)
        self.hidden_shape_before_permute, self.local_map = hidden_states.shape, self.routing_map
        chosen = self.routing_map.t().flatten()
        places = chosen.nonzero_static(size=num_tokens * self.router_topk)[:, 0]
        self.reversed_local_input_permutation_mapping = places % num_tokens
        rows = hidden_states.index_select(0, self.reversed_local_input_permutation_mapping)
        return rows, self.routing_map.sum(0), probs.t().flatten().index_select(0, places)


class LocalExperts(SequentialMLP):
    """The experts of a layer that a rank holds; backward keeps tokens, and what the first layers give.

    Args:
        arguments, named: those of SequentialMLP.
        activate: see RecomputableMLP.
        is_grouped: whether by torch's grouped products, if widths suit them; experts then come in reverse
            order (grouped_experts.py).
    """

    def __init__(self, *arguments: Any, activate: Activation, is_grouped: bool, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._activate = activate
        sizes = [size for weight in self.local_experts[0].parameters() for size in weight.shape]
        self.is_grouped = is_grouped and not any(size % SIZES for size in sizes)
        for parameter in self.parameters():
            parameter.series = id(self)  # type: ignore[attr-defined]  # see TrainedParameters.specs

    def forward(
        self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """The experts' results, each multiplied by its weight.

        Args:
            tokens: [T, H], sorted by expert.
            tokens_per_expert: [experts], on the CPU or not.
            weights: [T], by the router.
        Returns:
            [T, H], and no bias.
        """
        layers = (self.local_experts[0].linear_fc1, self.local_experts[0].linear_fc2)
        if layers[0].product is FOUR_BITS or any(hasattr(layer, "adapters") for layer in layers):
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
            return GroupedExperts.apply(tokens, weights, ends, self._activate, *matrices), None
        return _Experts.apply(tokens, weights, tokens_per_expert.tolist(), self._activate, *matrices), None

    def _one_by_one(self, tokens: torch.Tensor, weights: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """The same by the experts' own layers, which have adapters or 4 bits; backward keeps more."""
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
    """Rows, experts, and their numbers of rows: on a CPU one expert after the other, whose rows are in its
    cache; on a GPU all, because each operation has a price."""
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
    """Write each expert's rows times its matrix into the output."""
    for own, matrix, result in zip(rows.split(sizes), matrices, output.split(sizes), strict=True):
        torch.mm(own, matrix, out=result)


class SharedExpert(SharedExpertMLP):
    """Upstream's expert of all tokens; a gate weighs its result for each token, if the model has one.

    Args:
        arguments, named: those of SharedExpertMLP.
        activate, is_recomputed: see RecomputableMLP.
    """

    def __init__(self, *arguments: Any, activate: Activation, is_recomputed: bool, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._activate, self._is_recomputed = activate, is_recomputed

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[S, B, H] in and out."""
        output, _ = through_layers(self, hidden_states, self._activate, is_recomputed=self._is_recomputed)
        if self.gate_weight is not None:
            output = output * linear(hidden_states, self.gate_weight).sigmoid()
        return output


def experts_spec(
    experts: MLPSubmodules,
    shared: MLPSubmodules,
    groups: ProcessGroupCollection,
    activate: Activation,
    *,
    share: float,
    is_recomputed: bool,
    is_grouped: bool,
) -> LayerPart:
    """The specification of a layer's experts.

    Args:
        experts: the two linear layers of an expert.
        shared: those of the shared expert, if the model has one.
        groups: megatron-core's process groups.
        activate, is_recomputed: see RecomputableMLP.
        share: see Router.
        is_grouped: see LocalExperts.
    """
    of_experts = {"activate": activate, "is_grouped": is_grouped}
    of_shared = {"activate": activate, "is_recomputed": is_recomputed}
    parts = MoESubmodules(
        experts=ModuleSpec(module=LocalExperts, submodules=experts, params=of_experts),
        shared_experts=ModuleSpec(module=SharedExpert, submodules=shared, params=of_shared),
        router=partial(Router, share=share),
    )
    return LayerPart(ExpertsLayer, parts, {"pg_collection": groups})
