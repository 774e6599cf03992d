"""Transformer layers that recompute or offload their activations (AC=full, AC=offload).

The layers subclass TransformerLayer and add no parameters. `patch.layout.pipeline_stages` chooses them.

The copy of a layer's activations to the host starts when the forward of the layer ends. The device memory is
freed when the forward of the next layer has ended. The copy back starts when the backward of the next layer
begins. So at most two offloaded layers have activations on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from patch.config.schema import TrainingConfig
from patch.layout.pipeline_stages import stage_activations
from patch.memory.saved_tensors import SavedGroup, SavedTensors

MIN_OFFLOAD_DIVISOR = 16
"""A saved tensor stays on the device if it is smaller than this fraction (1 / 16) of the layer's input."""


class RecomputedLayer(TransformerLayer):
    """A layer that keeps only its input; backward repeats its forward by `recompute`.

    megatron-core recomputes layers in the TransformerBlock (transformer_block.py:560-578). Here a layer
    recomputes itself, so that other layers of the block can be offloaded.
    """

    def __init__(self, *arguments: Any, recompute: Callable[..., Any], **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._recompute = recompute

    def forward(self, hidden_states: torch.Tensor, **arguments: Any) -> tuple[torch.Tensor, Any]:
        """Return the hidden states [S, B, H] and a context, which is None."""
        forward = super().forward
        if not self.training:
            return forward(hidden_states, **arguments)

        def compute(hidden: torch.Tensor) -> tuple[torch.Tensor, Any]:
            return forward(hidden, **arguments)

        return self._recompute(compute, False, hidden_states)


class OffloadedLayer(TransformerLayer):
    """A layer whose activations are in host memory between its forward and its backward."""

    def __init__(self, *arguments: Any, offload: StageOffload, is_first: bool, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.offload, self._is_first = offload, is_first

    def forward(self, hidden_states: torch.Tensor, **arguments: Any) -> tuple[torch.Tensor, Any]:
        """Return the hidden states [S, B, H] and a context, which is None."""
        forward = super().forward
        if not torch.is_grad_enabled():
            return forward(hidden_states, **arguments)
        with self.offload.saving(hidden_states, arguments, is_first=self._is_first):
            return forward(hidden_states, **arguments)


class StageOffload:
    """Copies the activations of a stage's offloaded layers to the host and back.

    `keeps_input`: the pipeline schedule keeps the stage's input until backward anyway.
    """

    def __init__(self, saved: SavedTensors, *, keeps_input: bool) -> None:
        self._saved, self._keeps_input = saved, keeps_input
        self._newest: SavedGroup | None = None
        """The group of the layer whose forward has just ended, if it is offloaded."""
        self._before: SavedGroup | None = None
        """The group of the layer before `_newest`, in the same forward of the stage."""

    @contextmanager
    def saving(self, hidden: torch.Tensor, arguments: dict[str, Any], *, is_first: bool) -> Iterator[None]:
        """Context for the forward of an offloaded layer with the input `hidden`.

        All layers share the tensors in `arguments`, so these stay on the device.
        """
        if is_first:
            self._before = None
        packed = arguments.get("packed_seq_params")
        shared = _storages_of([*arguments.values(), *(vars(packed).values() if packed else ())])
        if is_first and self._keeps_input:
            shared.add(hidden.untyped_storage()._cdata)
        least_bytes = hidden.nbytes / MIN_OFFLOAD_DIVISOR

        def stays(tensor: torch.Tensor) -> bool:
            storage = tensor.untyped_storage()
            return storage.nbytes() < least_bytes or storage._cdata in shared

        with self._saved.saving(stays) as self._newest:
            yield

    def follow(self, layer: torch.nn.Module, inputs: Any, output: tuple[torch.Tensor, Any]) -> None:
        """Forward hook of the offloaded layers and of the layer after them."""
        if not torch.is_grad_enabled():
            return
        self._saved.release(but=self._newest)
        if self._before is not None and output[0].requires_grad:
            output[0].register_hook(self._fetch(self._before))
        self._before, self._newest = self._newest, None

    def _fetch(self, group: SavedGroup) -> Callable[[torch.Tensor], None]:
        return lambda gradient: self._saved.fetch(group)


def _storages_of(values: list[Any]) -> set[int]:
    return {value.untyped_storage()._cdata for value in values if isinstance(value, torch.Tensor)}


def layer_kinds(
    num_layers: int, training: TrainingConfig, offload: StageOffload | None, recompute: Callable[..., Any]
) -> list[tuple[type[TransformerLayer], dict[str, Any]]]:
    """Return the class of each layer of a stage, and its arguments besides those of TransformerLayer."""
    split = stage_activations(num_layers, training)
    kinds: list[tuple[type[TransformerLayer], dict[str, Any]]] = [(TransformerLayer, {})] * num_layers
    if training.recompute_method == "block":
        recomputed = slice(split.offloaded, split.offloaded + split.recomputed)
        kinds[recomputed] = [(RecomputedLayer, {"recompute": recompute})] * split.recomputed
    for index in range(split.offloaded):
        kinds[index] = OffloadedLayer, {"offload": offload, "is_first": index == 0}
    return kinds


def follow_offloaded(layers: Sequence[torch.nn.Module]) -> None:
    """Register the stage's hooks on the offloaded layers, which come first, and on the layer after them."""
    offloads = [layer.offload for layer in layers if isinstance(layer, OffloadedLayer)]
    for layer in layers[: len(offloads) + 1] if offloads else ():
        layer.register_forward_hook(offloads[0].follow)
