"""The MLP: it keeps what its first layer gives for backward, and computes the activation there again.

Upstream's unfused gated MLP keeps 5.3 values for each of the F channels: gate and up, silu(gate), up plus an
offset of zero, and the product. This one keeps three with SwiGLU: gate and up, and the product, which the
second layer needs. With AC=sel it keeps two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import CheckpointWithoutOutput
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn.functional import silu

from patch.eight_bits import note_amax
from patch.families import Traits
from patch.model.kernels import LayerKernels, layer_kernels

Activation = Callable[..., torch.Tensor]
"""The function between the two layers of an MLP; its input has its bias added, but for `_bias_gelu`."""


class RecomputableMLP(MLP):
    """Upstream's MLP with another activation.

    Args:
        activate: what comes between the two layers, [S, B, 2 F] (gated) or [S, B, F] to [S, B, F].
        is_recomputed: whether backward computes it again (AC=sel). The memory of its result is freed after
            the second layer has read it, and filled when that layer's gradient arrives.
        arguments, named: those of upstream's MLP.
    """

    def __init__(self, *arguments: Any, activate: Activation, is_recomputed: bool, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._activate, self._is_recomputed = activate, is_recomputed

    def forward(self, hidden_states: torch.Tensor, **unused: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[S, B, H] in; [S, B, H] out, and the second layer's bias, which upstream adds with the residual."""
        return through_layers(self, hidden_states, self._activate, is_recomputed=self._is_recomputed)


def through_layers(
    mlp: MLP, hidden: torch.Tensor, activate: Activation, *, is_recomputed: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """RecomputableMLP's forward with the two layers of any of upstream's MLPs."""
    hidden, bias = mlp.linear_fc1(hidden)
    inputs = (hidden, bias) if activate is _bias_gelu else (hidden if bias is None else hidden + bias,)
    if not is_recomputed:
        return mlp.linear_fc2(activate(*inputs))
    recomputed = CheckpointWithoutOutput()
    output, bias = mlp.linear_fc2(recomputed.checkpoint(activate, *inputs))
    recomputed.discard_output_and_register_recompute(output)
    return output, bias


@dataclass(frozen=True)
class LayerPart:
    """The specification of a TransformerLayer's MLP or experts.

    megatron-core 0.16 and 0.17 read these attributes (`build_module`), later releases call the object. It is
    no ModuleSpec, because 0.16 logs that it does not know the module of one and gives it no process groups
    (transformer_layer.py:351-369).
    """

    module: type[torch.nn.Module]
    submodules: Any
    params: dict[str, Any]
    """Further arguments of the module, its process groups among them."""

    def __call__(self, config: TransformerConfig, **unused: Any) -> torch.nn.Module:
        """The module. Unused are the layer's groups, its place and its name."""
        return self.module(config=config, submodules=self.submodules, **self.params)


def mlp_spec(
    submodules: MLPSubmodules, group: ProcessGroup, activate: Activation, *, is_recomputed: bool
) -> LayerPart:
    """The specification of a layer's MLP.

    Args:
        submodules: the two linear layers.
        group: the TP group.
        activate, is_recomputed: see RecomputableMLP.
    """
    params = {"activate": activate, "is_recomputed": is_recomputed, "tp_group": group}
    return LayerPart(RecomputableMLP, submodules, params)


def activation_called(name: str) -> Activation:
    """The function of `Traits.activation`, element by element; transformers has all but SiLU."""
    if name == "silu":
        return silu
    from transformers.activations import ACT2FN  # it takes a second to import

    return ACT2FN[name].forward  # upstream takes a module for a part with weights


def activation_of(
    traits: Traits, function: Activation, *, is_fused: bool, notes_amax: bool = False
) -> Activation:
    """The function between the two layers of an MLP.

    Args:
        traits: whether it is gated.
        function: see `activation_called`, or one with its values in another order.
        is_fused: whether SwiGLU, and GELU with its bias, are in Triton.
        notes_amax: whether SwiGLU notes the largest number of what it writes, for casts to 8 bits.
    """
    if not traits.gated_linear_unit:
        is_gelu = traits.add_bias_linear and traits.activation == "gelu_pytorch_tanh"
        return _bias_gelu if is_gelu and is_fused else function
    if function is silu:
        return partial(swiglu, is_fused=is_fused, notes_amax=notes_amax)
    return partial(_gated, function=function)


def _gated(gate_up: torch.Tensor, *, function: Activation) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return function(gate) * up


def swiglu(gate_up: torch.Tensor, *, is_fused: bool, notes_amax: bool = False) -> torch.Tensor:
    """silu(gate) * up, of which backward keeps only the merged gate and up.

    Args:
        gate_up: [..., 2 F].
        is_fused: whether in Triton.
        notes_amax: see `activation_of`.
    Returns:
        [..., F].
    """
    return _SwiGlu.apply(gate_up, layer_kernels(is_fused), notes_amax)


def is_fused_swiglu(activate: Activation) -> bool:
    """Whether an activation of `activation_of` is SwiGLU in Triton."""
    return isinstance(activate, partial) and activate.func is swiglu and activate.keywords["is_fused"]


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor, kernels: LayerKernels, notes_amax: bool) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        ctx.kernels, ctx.notes_amax = kernels, notes_amax
        return _written(kernels.swiglu, gate_up, notes_amax=notes_amax)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gate_up,) = ctx.saved_tensors
        kernel = ctx.kernels.swiglu_backward
        return _written(kernel, gradient, gate_up, notes_amax=ctx.notes_amax), None, None


def _written(kernel: Activation, *arguments: torch.Tensor, notes_amax: bool) -> torch.Tensor:
    """The output of a kernel; its amax is noted if a cast to 8 bits follows."""
    amax = arguments[0].new_zeros((), dtype=torch.float32) if notes_amax else None
    result = kernel(*arguments, amax)
    if amax is not None:
        note_amax(result, amax)
    return result


def _bias_gelu(hidden: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """GELU of a product [..., F] and its bias [F], on a GPU: backward keeps both, not their sum.

    No epilogue of torch's products serves: `_addmm_activation` forgets what backward needs.
    """
    return _BiasGelu.apply(hidden, bias)


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        from patch.model.kernels import fused  # only torch's CUDA builds come with Triton

        ctx.save_for_backward(hidden, bias)
        ctx.backward_of = fused.bias_gelu_backward
        return fused.bias_gelu(hidden, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        of_hidden = ctx.backward_of(gradient, *ctx.saved_tensors)
        return of_hidden, of_hidden.flatten(0, -2).sum(0)
