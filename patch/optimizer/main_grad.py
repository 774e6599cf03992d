"""Gradients that a layer's backward adds to the grad buffer itself.

Each trained parameter has a MainGrad as its attribute `main_grad_writer`, for our own layers
(patch/model/weight_gradient.py). It also has the attributes by which Transformer Engine's layers work with
megatron-core's FSDP (transformer_engine/pytorch/module/linear.py): `get_main_grad`, called in backward
because of `__fsdp_param__`; `overwrite_main_grad`; and `grad_added_to_main_grad`, which the layer sets.

autograd calls the hooks of a parameter only with a gradient. So a layer returns a stand-in, whose values
nobody reads. Ours consists of zeros, so a sum of it and other gradients of the same parameter is right, too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from patch.config.schema import OptimizerConfig


def is_fused(config: OptimizerConfig, device: torch.device) -> bool:
    """Whether layers may add gradients to the grad buffer; by default on GPUs, where a product can add."""
    fused = config.gradient_accumulation_fusion
    return device.type == "cuda" if fused is None else fused


class StandIns:
    """Zeros in the shapes of gradients, all in the same memory; nobody may write to them."""

    def __init__(self) -> None:
        self._zeros: dict[torch.dtype, torch.Tensor] = {}

    def like(self, parameter: torch.Tensor) -> torch.Tensor:
        """Zeros in the shape of a parameter and the type of its gradient."""
        dtype = parameter.grad_dtype or parameter.dtype  # not 8 bits, where a weight is gathered so
        zeros = self._zeros.get(dtype)
        if zeros is None or zeros.numel() < parameter.numel():
            zeros = self._zeros[dtype] = parameter.new_zeros(parameter.numel(), dtype=dtype)
        return zeros[: parameter.numel()].view(parameter.shape)

    def contain(self, gradient: torch.Tensor) -> bool:
        """Whether a gradient is nothing but a stand-in."""
        zeros = self._zeros.get(gradient.dtype)
        address = gradient.untyped_storage().data_ptr()
        return zeros is not None and zeros.untyped_storage().data_ptr() == address


class MainGrad:
    """Where the gradient of one parameter belongs, asked for in backward, when it is about to be written.

    Args:
        parameter: gets the attributes that layers look for.
        stand_ins: shared by all parameters.
        find_place: the place now, and whether it holds nothing of this step yet.
    """

    def __init__(
        self,
        parameter: torch.nn.Parameter,
        stand_ins: StandIns,
        find_place: Callable[[], tuple[torch.Tensor, bool]],
    ) -> None:
        self._parameter, self._stand_ins, self.open = parameter, stand_ins, find_place
        attributes = {
            "main_grad_writer": self,
            "__fsdp_param__": True,
            "get_main_grad": self._open_for_upstream,
            "grad_added_to_main_grad": False,
        }
        for name, value in attributes.items():
            setattr(parameter, name, value)

    def stand_in(self) -> torch.Tensor:
        """Dummy gradient for autograd: the real one is already in main_grad."""
        return self._stand_ins.like(self._parameter)

    def _open_for_upstream(self) -> torch.Tensor:
        place, is_first = self.open()
        if is_first:
            # With 8-bit products TE's layer with a norm asks the 8-bit copy of the weight for the mark
            # (layernorm_linear.py:871), which has none, and so adds.
            place.zero_()
        self._parameter.overwrite_main_grad = is_first  # type: ignore[attr-defined]
        return place

    def take_note(self, gradient: torch.Tensor) -> bool:
        """Whether the gradient that autograd brings is in its place already; asked once for each."""
        is_added = self._parameter.grad_added_to_main_grad  # type: ignore[attr-defined]
        self.reset()
        return is_added or self._stand_ins.contain(gradient)

    def reset(self) -> None:
        """Forget a gradient whose backward an error ended."""
        self._parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
