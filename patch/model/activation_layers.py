"""Layers whose activations are not all kept until backward: recomputed ones (`--recompute-method block`).

They are upstream's layers with another class, set after they are built, and have no state of their own.
`patch.config.activation_layers` decides which layers they are.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.transformer_layer import TransformerLayer

from patch.config.activation_layers import stage_activations
from patch.config.schema import Execution


class RecomputedLayer(TransformerLayer):
    """A layer of which only the input is kept; backward repeats its forward.

    Upstream recomputes single layers in its block of layers (transformer_block.py:560-578). Here a layer does
    so itself, so that another one of the block can be offloaded.
    """

    def forward(self, hidden_states: torch.Tensor, **arguments: Any) -> tuple[torch.Tensor, Any]:
        """TransformerLayer's: hidden states [S, B, H] in; the same and a context, which is None, out."""
        forward = super().forward
        if not self.training:
            return forward(hidden_states, **arguments)
        return checkpoint(lambda hidden: forward(hidden, **arguments), False, hidden_states)


def set_activation_layers(stage: Any, execution: Execution) -> None:
    """Give the layers of a model's pipeline stage the classes that do what the settings say.

    Args:
        stage: a GPTModel.
        execution: the settings.
    """
    layers = stage.decoder.layers
    split = stage_activations(len(layers), execution)
    if execution.recompute_method == "block":
        for layer in layers[split.offloaded : split.offloaded + split.recomputed]:
            layer.__class__ = RecomputedLayer
