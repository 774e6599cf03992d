"""CUDA graphs of the layers: in training steps a layer's forward and its backward are one launch each.

torch captures (torch.cuda.make_graphed_callables), and its protocol is what makes this right: all layers'
forwards and then all backwards in reverse share memory in the order in which a micro-batch runs them, a
layer's input is copied to where its graph reads it, and its gradients come out of one autograd function, at
the same addresses each time. What follows from that here:

- Weights stay where they are in the optimizer's flat buffer, so a replay reads the newest. Hooks inside a
  layer are not replayed; all of its weights are waited for before the replay.
- Gradients of weights pass autograd's own nodes, so the optimizer's hooks run as without graphs. They copy
  or add a gradient at once, on the stream of the replay, before the next micro-batch overwrites it.
- Such a node belongs to the stream on which it was made, and lives as long as any graph of autograd that has
  it. Those of the warm-up must end before the capture, and those of the capture with it: otherwise the hooks,
  and the reductions that they start, would run on the capture's stream, beside those of their bucket's other
  parameters. torch keeps the captured outputs, so these lose their graph.

Whatever was not captured runs without graphs: evaluation, other shapes, packed rows; and, said in the log, a
layer in training whose input needs no gradient, because all before it is frozen.

Shapes: S sequence, B micro-batch, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from patch.logger import get_logger

_logger = get_logger(__name__)

Captured = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states [S, B, H] to those after the layer."""


class LayerAlone(torch.nn.Module):
    """A layer as a function of hidden states [S, B, H] alone, as torch captures it.

    Args:
        layer: one of our own.
        table: of `RotaryTable` for rows of S tokens.
    """

    def __init__(self, layer: TransformerLayer, table: torch.Tensor) -> None:
        super().__init__()
        self.layer, self._table = layer, table
        self.output: torch.Tensor | None = None
        """The newest, which torch keeps if it was captured."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's forward, without a context, after a backward of the one before."""
        self.end_autograd_graph()
        self.output, _ = self.layer(hidden, rotary_pos_emb=self._table)
        return self.output

    def end_autograd_graph(self) -> None:
        """Let go of autograd's nodes of the newest forward; who keeps its output, keeps the values."""
        if self.output is not None:
            self.output.detach_()
        self.output = None


class GraphedForward:
    """The `forward` of a layer that was captured.

    Args:
        layer: its parameters are waited for.
        captured: computes what the layer does, for inputs like `example`.
        example: hidden states [S, B, H] in a training step.
    """

    def __init__(self, layer: TransformerLayer, captured: Captured, example: torch.Tensor) -> None:
        self._layer, self._captured, self._plain = layer, captured, layer.forward
        self._shape, self._dtype = example.shape, example.dtype
        self._is_refusal_noted = False

    def __call__(
        self, hidden_states: torch.Tensor, *, packed_seq_params: Any = None, **arguments: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """TransformerLayer's forward, as upstream's block calls it."""
        if packed_seq_params is not None or not self._is_captured(hidden_states):
            return self._plain(hidden_states, packed_seq_params=packed_seq_params, **arguments)
        list(self._layer.parameters())  # within a stage's forward this waits for the gathers of their updates
        return self._captured(hidden_states), None

    def _is_captured(self, hidden: torch.Tensor) -> bool:
        if not (self._layer.training and torch.is_grad_enabled()):
            return False
        is_like_example = hidden.shape == self._shape and hidden.dtype == self._dtype
        if is_like_example and not hidden.requires_grad and not self._is_refusal_noted:
            self._is_refusal_noted = True
            _logger.warning(
                "layer %d runs without its CUDA graph: its input needs no gradient, because all before it is "
                "frozen; a graph would compute that gradient",
                self._layer.layer_number,
            )
        return is_like_example and hidden.requires_grad


def capture_layers(layers: Sequence[TransformerLayer], table: torch.Tensor, num_rows: int) -> None:
    """Capture all layers of a model, in training mode, and replay them from here on.

    No other thread may use the GPU meanwhile, and all weights have to be in place for good.

    Args:
        layers: in their order; with no autograd graph of theirs alive.
        table: of `RotaryTable` for rows of S tokens, [2, S, 1, 1, D / 2], on the GPU.
        num_rows: B.
    Raises:
        torch.OutOfMemoryError: there is no memory for the graphs.
    """
    width, dtype = layers[0].config.hidden_size, layers[0].config.params_dtype
    examples = [
        torch.ones(table.shape[1], num_rows, width, dtype=dtype, device=table.device, requires_grad=True)
        for _ in layers
    ]
    alone = [LayerAlone(layer, table) for layer in layers]
    torch.cuda.make_graphed_callables(tuple(alone), tuple((example,) for example in examples))
    for layer, captured, example in zip(layers, alone, examples, strict=True):
        captured.end_autograd_graph()
        layer.forward = GraphedForward(layer, captured, example)
