"""Layers whose activations are not all kept until backward: recomputed and offloaded ones (AC=full, offload).

They are upstream's layers with another class, set after they are built, and have no parameters of their own.
`patch.layout.pipeline_stages` decides which layers they are.

An offloaded layer's activations start for the host when its forward ends, while the next layer computes; when
that one has ended too, their memory on the device is freed. They start back when the next layer's backward
begins. So at most two offloaded layers have activations on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import checkpoint
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
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
    """

    def forward(self, hidden_states: torch.Tensor, **arguments: Any) -> tuple[torch.Tensor, Any]:
        """TransformerLayer's: hidden states [S, B, H] in; the same and a context, which is None, out."""
        forward = super().forward
        if not self.training:
            return forward(hidden_states, **arguments)

        def compute(hidden: torch.Tensor) -> tuple[torch.Tensor, Any]:
            return forward(hidden, **arguments)

        if self.config.fp8:  # by Transformer Engine, whose context backward must enter again
            from megatron.core.extensions.transformer_engine import te_checkpoint

            return te_checkpoint(compute, False, get_cuda_rng_tracker, self.pg_collection.tp, hidden_states)
        return checkpoint(compute, False, hidden_states)


class OffloadedLayer(TransformerLayer):
    """A layer whose activations are in host memory between its forward and its backward."""

    offload: StageOffload
    is_first: bool
    """Whether it is the first layer of its stage."""

    def forward(self, hidden_states: torch.Tensor, **arguments: Any) -> tuple[torch.Tensor, Any]:
        """TransformerLayer's: hidden states [S, B, H] in; the same and a context, which is None, out."""
        forward = super().forward
        if not torch.is_grad_enabled():
            return forward(hidden_states, **arguments)
        with self.offload.saving(hidden_states, arguments, is_first=self.is_first):
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


def set_activation_layers(stage: GPTModel, execution: Execution, saved: SavedTensors | None) -> None:
    """Give the layers of a pipeline stage the classes that do what the settings say.

    Args:
        stage: the model.
        execution: the settings.
        saved: of the process, if it offloads activations.
    """
    layers = stage.decoder.layers
    split = stage_activations(len(layers), execution)
    if execution.recompute_method == "block":
        for layer in layers[split.offloaded : split.offloaded + split.recomputed]:
            layer.__class__ = RecomputedLayer
    if saved is None or not split.offloaded:
        return
    offload = StageOffload(saved, keeps_input=not stage.pre_process)
    for layer in layers[: split.offloaded]:
        layer.__class__ = OffloadedLayer
        layer.offload, layer.is_first = offload, layer is layers[0]
    for layer in layers[: split.offloaded + 1]:
        layer.register_forward_hook(offload.follow)
