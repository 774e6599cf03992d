"""The MLP: backward recomputes the activation from the output of the first layer.

megatron-core's unfused gated MLP keeps 5.3 values for each of the F channels: gate and up, silu(gate), up
plus an offset of zero, and the product. This MLP with SwiGLU keeps three: gate and up, and the product, which
the second layer needs. With AC=sel it keeps two. In chunks of tokens (--mlp-chunks-for-training) it keeps
only its input: backward recomputes a chunk and frees it before the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import CheckpointWithoutOutput
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint

from patch.amax import note_amax
from patch.families import Traits
from patch.model.kernels import LayerKernels, layer_kernels

Activation = Callable[..., torch.Tensor]
"""The function between the two layers of an MLP. The bias is in its input, except for `_bias_gelu`."""


class RecomputableMLP(MLP):
    """megatron-core's MLP with another activation.

    Args:
        activate: [S, B, 2 F] (gated) or [S, B, F] to [S, B, F].
        is_recomputed: whether backward recomputes the activation (AC=sel). The output's memory is freed after
            the second layer has read it, and filled when the gradient of the second layer arrives.
        num_chunks: chunks of the sequence, one after the other; megatron-core 0.19 has this in its own layer.
    """

    def __init__(
        self, *arguments: Any, activate: Activation, is_recomputed: bool, num_chunks: int, **named: Any
    ) -> None:
        super().__init__(*arguments, **named)
        self._activate, self._is_recomputed, self._num_chunks = activate, is_recomputed, num_chunks

    def forward(self, hidden_states: torch.Tensor, **unused: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return [S, B, H] and the second layer's bias, which megatron-core adds with the residual."""
        if self._num_chunks == 1:
            return through_layers(self, hidden_states, self._activate, is_recomputed=self._is_recomputed)
        compute = partial(through_layers, self, activate=self._activate, is_recomputed=False)
        chunks = hidden_states.chunk(self._num_chunks)
        if torch.is_grad_enabled():
            compute = partial(checkpoint, compute, use_reentrant=False, preserve_rng_state=False)
        outputs, biases = zip(*map(compute, chunks), strict=True)
        return torch.cat(outputs), biases[0]


def through_layers(
    mlp: MLP, hidden: torch.Tensor, activate: Activation, *, is_recomputed: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the forward of RecomputableMLP with the two layers of any megatron-core MLP."""
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
    not a ModuleSpec, because 0.16 logs an unknown module and passes no process groups
    (transformer_layer.py:351-369).
    """

    module: type[torch.nn.Module]
    submodules: Any
    params: dict[str, Any]
    """Further arguments of the module, with its process groups."""

    def __call__(self, config: TransformerConfig, **unused: Any) -> torch.nn.Module:
        """Build the module."""
        return self.module(config=config, submodules=self.submodules, **self.params)


def activation_called(name: str) -> Activation:
    """Return the element-wise function of `Traits.activation`."""
    if name == "silu":
        return silu
    from transformers.activations import ACT2FN  # it takes a second to import

    return ACT2FN[name].forward  # not the module: megatron-core would expect weights in it


def activation_of(
    traits: Traits, function: Activation, *, is_fused: bool, notes_amax: bool = False
) -> Activation:
    """Return the function between the two layers of an MLP.

    Args:
        function: from `activation_called`, or the same function in Hugging Face's order.
        is_fused: whether SwiGLU, and GELU with its bias, are Triton kernels.
        notes_amax: whether SwiGLU notes the amax of its output, for a later cast.
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
    """Return silu(gate) * up, [..., F], from [..., 2 F]. Backward keeps only the merged gate and up."""
    return _SwiGlu.apply(gate_up, layer_kernels(is_fused), notes_amax)


def is_fused_swiglu(activate: Activation) -> bool:
    """Return whether an activation from `activation_of` is SwiGLU in Triton."""
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
    amax = arguments[0].new_zeros((), dtype=torch.float32) if notes_amax else None
    result = kernel(*arguments, amax)
    if amax is not None:
        note_amax(result, amax)
    return result


def _bias_gelu(hidden: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return GELU of a product [..., F] plus bias [F], on a GPU. Backward keeps both, not their sum."""
    # torch's epilogue `_addmm_activation` does not return the input of GELU, which backward needs.
    return _BiasGelu.apply(hidden, bias)


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        from patch.model.kernels import fused  # only CUDA builds of torch have Triton

        ctx.save_for_backward(hidden, bias)
        ctx.backward_of = fused.bias_gelu_backward
        return fused.bias_gelu(hidden, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        of_hidden = ctx.backward_of(gradient, *ctx.saved_tensors)
        return of_hidden, of_hidden.flatten(0, -2).sum(0)
