"""Layers whose activations are not all kept until backward: recomputed and offloaded ones (AC=full, offload).

They are subclasses of upstream's layer and have no parameters of their own. `patch.layout.pipeline_stages`
decides which layers they are.

An offloaded layer's activations start for the host when its forward ends, while the next layer computes; when
that one has ended too, their memory on the device is freed. They start back when the next layer's backward
begins. So at most two offloaded layers have activations on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from patch.config.execution import Execution
from patch.layout.pipeline_stages import stage_activations
from patch.memory import SavedTensors
from patch.memory.saved_tensors import SavedGroup

LEAST_SHARE = 16
"""A saved tensor stays on the device if it has less than this part of the bytes of the layer's input."""


class RecomputedLayer(TransformerLayer):
    """A layer of which only the input is kept; backward repeats its forward.

    Upstream recomputes single layers in its block of layers (transformer_block.py:560-578). Here a layer does
    so itself, so that another one of the block can be offloaded.

    Args:
        recompute: upstream's `checkpoint`, or one that takes its arguments.
        arguments, named: those of TransformerLayer.
    """

    def __init__(self, *arguments: Any, recompute: Callable[..., Any], **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._recompute = recompute

    def forward(self, hidden_states: torch.Tensor, **arguments: Any) -> tuple[torch.Tensor, Any]:
        """TransformerLayer's: hidden states [S, B, H] in; the same and a context, which is None, out."""
        forward = super().forward
        if not self.training:
            return forward(hidden_states, **arguments)

        def compute(hidden: torch.Tensor) -> tuple[torch.Tensor, Any]:
            return forward(hidden, **arguments)

        return self._recompute(compute, False, hidden_states)


class OffloadedLayer(TransformerLayer):
    """A layer whose activations are in host memory between its forward and its backward.

    Args:
        offload: of the stage.
        is_first: whether it is the first layer of its stage.
        arguments, named: those of TransformerLayer.
    """

    def __init__(self, *arguments: Any, offload: StageOffload, is_first: bool, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.offload, self._is_first = offload, is_first

    def forward(self, hidden_states: torch.Tensor, **arguments: Any) -> tuple[torch.Tensor, Any]:
        """TransformerLayer's: hidden states [S, B, H] in; the same and a context, which is None, out."""
        forward = super().forward
        if not torch.is_grad_enabled():
            return forward(hidden_states, **arguments)
        with self.offload.saving(hidden_states, arguments, is_first=self._is_first):
            return forward(hidden_states, **arguments)


class StageOffload:
    """Sends the activations of a stage's offloaded layers, and fetches them.

    Args:
        saved: of the process.
        keeps_input: whether the stage's input is kept until backward anyway: the pipeline's schedule does so.
    """

    def __init__(self, saved: SavedTensors, *, keeps_input: bool) -> None:
        self._saved, self._keeps_input = saved, keeps_input
        self._newest: SavedGroup | None = None
        """The group of the layer whose forward has just ended, if it is offloaded."""
        self._before: SavedGroup | None = None
        """The group of the layer before that one, in the same forward of the stage."""

    @contextmanager
    def saving(self, hidden: torch.Tensor, arguments: dict[str, Any], *, is_first: bool) -> Iterator[None]:
        """A context for the forward of an offloaded layer.

        Args:
            hidden: its input.
            arguments: what else it gets, which other layers get too, so its tensors stay.
            is_first: whether it is the first layer of the stage.
        """
        if is_first:
            self._before = None
        packed = arguments.get("packed_seq_params")
        shared = _storages_of([*arguments.values(), *(vars(packed).values() if packed else ())])
        if is_first and self._keeps_input:
            shared.add(hidden.untyped_storage()._cdata)
        least_bytes = hidden.nbytes / LEAST_SHARE

        def stays(tensor: torch.Tensor) -> bool:
            storage = tensor.untyped_storage()
            return storage.nbytes() < least_bytes or storage._cdata in shared

        with self._saved.saving(stays) as self._newest:
            yield

    def follow(self, layer: torch.nn.Module, inputs: Any, output: tuple[torch.Tensor, Any]) -> None:
        """A forward hook of the offloaded layers, and of the one that follows them."""
        if not torch.is_grad_enabled():
            return
        self._saved.release(but=self._newest)
        if self._before is not None and output[0].requires_grad:
            output[0].register_hook(self._fetch(self._before))
        self._before, self._newest = self._newest, None

    def _fetch(self, group: SavedGroup) -> Callable[[torch.Tensor], None]:
        return lambda gradient: self._saved.fetch(group)


def _storages_of(values: list[Any]) -> set[int]:
    """Identities of the storages of the tensors among some values."""
    return {value.untyped_storage()._cdata for value in values if isinstance(value, torch.Tensor)}


def layer_kinds(
    num_layers: int, execution: Execution, offload: StageOffload | None, recompute: Callable[..., Any]
) -> list[tuple[type[TransformerLayer], dict[str, Any]]]:
    """The class of each layer of a stage, and what it takes besides upstream's arguments.

    Args:
        num_layers: of the stage.
        execution: the settings.
        offload: of the stage, if the process offloads activations.
        recompute: see RecomputedLayer.
    """
    split = stage_activations(num_layers, execution)
    kinds: list[tuple[type[TransformerLayer], dict[str, Any]]] = [(TransformerLayer, {})] * num_layers
    if execution.recompute_method == "block":
        recomputed = slice(split.offloaded, split.offloaded + split.recomputed)
        kinds[recomputed] = [(RecomputedLayer, {"recompute": recompute})] * split.recomputed
    for index in range(split.offloaded):
        kinds[index] = OffloadedLayer, {"offload": offload, "is_first": index == 0}
    return kinds


def follow_offloaded(layers: Sequence[torch.nn.Module]) -> None:
    """Let a stage's offload follow its offloaded layers, which come first, and the one behind them."""
    offloads = [layer.offload for layer in layers if isinstance(layer, OffloadedLayer)]
    for layer in layers[: len(offloads) + 1] if offloads else ():
        layer.register_forward_hook(offloads[0].follow)
