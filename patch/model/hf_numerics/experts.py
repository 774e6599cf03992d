"""Experts in Hugging Face's order of operations (`--precision-align`), all experts in one process.

The order is that of transformers' loop (`experts_implementation="eager"`): expert after expert. An expert's
tokens are sorted by the rank of the expert among the token's choices. Weights are applied after the second
product. Results are added to a token one at a time. Parameter names are those of experts/layer.py.

Shapes: S sequence, B micro-batch, T = B x S tokens, batch first, H hidden, K experts per token.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_layer import MoELayer

from patch.model.experts.layer import GroupLimitedTopK, Router
from patch.model.mlp import Activation


class AlignedRouter(Router):
    """A router that returns the experts of each token and their weights, bitwise equal to transformers.

    `is_normed` divides a token's softmax weights by their sum; sigmoid weights always are divided. `own` is
    Family.own_of_router.
    """

    def __init__(self, *arguments: Any, is_normed: bool, own: Set[str], **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._is_normed, self._own = is_normed, own
        if "unsorted" in own:
            self.router_replay = GroupLimitedTopK(self.score_function, is_sorted=False)

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [S, B, experts] of tokens [B, S, H]."""
        dtype = torch.float32 if "logits" in self._own else input.dtype
        logits = F.linear(input.flatten(0, 1).to(dtype), self.weight.to(dtype))
        return logits.float().view(*input.shape[:2], -1).transpose(0, 1).contiguous()

    def routing(self, logits: torch.Tensor, padding_mask: None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights and experts of tokens, both [T, K], from logits [S, B, experts]."""
        replay = self.router_replay
        self.router_replay = choices = _Choices(replay)
        try:
            scores, _ = super().routing(logits)
        finally:
            self.router_replay = replay
        weights = scores.gather(1, choices.chosen)
        if self._is_normed and self.score_function == "softmax":
            weights = weights / weights.sum(dim=-1, keepdim=True)
        if "weights" not in self._own:
            weights = weights.to(self.weight.dtype)
        return _batch_first(weights, logits.shape[1]), _batch_first(choices.chosen, logits.shape[1])


class _Choices:
    """A router replay for megatron-core that records the chosen experts in their order."""

    chosen: torch.Tensor

    def __init__(self, replay: Any) -> None:
        self._replay = replay

    def get_replay_topk(self, *question: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores of chosen experts, and the experts."""
        *sizes, choose = question
        scores, self.chosen = self._replay.get_replay_topk(*question) if self._replay else choose(*sizes)
        return scores, self.chosen


def _batch_first(of_tokens: torch.Tensor, rows: int) -> torch.Tensor:
    return of_tokens.unflatten(0, (-1, rows)).transpose(0, 1).flatten(0, 1)


class AlignedMoELayer(MoELayer):
    """megatron-core's layer without its dispatcher.

    Autograd sums a token's gradients in the order of the token's uses, so that order is transformers' too. A
    shared expert with a gate is computed first (Qwen 2), a shared expert without a gate last (DeepSeek).
    """

    def __init__(self, *arguments: Any, activate: Activation, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._activate = activate

    def forward(self, hidden_states: torch.Tensor, **unused: Any) -> tuple[torch.Tensor, None]:
        """Return the output [S, B, H] and no bias."""
        rows_first = hidden_states.transpose(0, 1)
        tokens, shared = rows_first.flatten(0, 1), self.shared_experts
        gate_weight = None if shared is None else shared.gate_weight
        if gate_weight is not None:
            of_shared = self._of_shared(tokens)
        routed = self.router(tokens.view_as(rows_first))
        # DeepSeek's experts use a separate view, made after the router, in which their gradients are summed.
        of_experts = tokens if shared is None or gate_weight is not None else tokens.view_as(tokens)
        output = self._of_experts(of_experts, *routed)
        if gate_weight is not None:
            output = output + F.linear(tokens, gate_weight).sigmoid() * of_shared
        elif shared is not None:
            output = output + self._of_shared(tokens)
        return output.view_as(rows_first).transpose(0, 1), None

    def _of_shared(self, tokens: torch.Tensor) -> torch.Tensor:
        first, second = self.shared_experts.linear_fc1, self.shared_experts.linear_fc2
        gate, up = first.product.multiply(tokens, first.weight, None).chunk(2, dim=-1)
        hidden = self._activate(gate.contiguous()) * up
        output: torch.Tensor = second.product.multiply(hidden, second.weight, None)
        return output

    def _of_experts(self, tokens: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's experts, [T, H], from weights and experts [T, K]."""
        output = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts.local_experts):
            places, rows = torch.where(chosen.t() == number)
            gate, up = F.linear(tokens[rows], expert.linear_fc1.weight).chunk(2, dim=-1)
            result = F.linear(self._activate(gate) * up, expert.linear_fc2.weight)
            result = result * weights[rows, places, None]
            output.index_add_(0, rows, result.to(output.dtype))
        return output
