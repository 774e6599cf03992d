"""Gradients that a layer's backward accumulates directly in the grad buffer.

Each trained parameter has a MainGrad as its attribute `main_grad_writer`, for this project's layers
(patch/model/weight_gradient.py). It also has the attributes that Transformer Engine's layers use with
megatron-core's FSDP (transformer_engine/pytorch/module/linear.py): `get_main_grad`, called in backward
because of `__fsdp_param__`; `overwrite_main_grad`; and `grad_added_to_main_grad`, which the layer sets.

autograd calls the hooks of a parameter only with a gradient. So a layer returns a dummy gradient, whose
values are never used. It is zero, so that a sum with other gradients of the parameter is right, too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class DummyWgrads:
    """Dummy gradients: zeros of all shapes in the same memory, which must not be written."""

    def __init__(self) -> None:
        self._zeros: dict[torch.dtype, torch.Tensor] = {}

    def like(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return zeros with the shape of a parameter and the dtype of its gradient."""
        dtype = parameter.grad_dtype or parameter.dtype  # not fp8, if the weight is gathered in fp8
        zeros = self._zeros.get(dtype)
        if zeros is None or zeros.numel() < parameter.numel():
            zeros = self._zeros[dtype] = parameter.new_zeros(parameter.numel(), dtype=dtype)
        return zeros[: parameter.numel()].view(parameter.shape)

    def contain(self, gradient: torch.Tensor) -> bool:
        """Return whether a gradient is only a dummy."""
        zeros = self._zeros.get(gradient.dtype)
        address = gradient.untyped_storage().data_ptr()
        return zeros is not None and zeros.untyped_storage().data_ptr() == address


class MainGrad:
    """The place of one parameter's gradient, which a layer requests in backward before writing it.

    Args:
        parameter: gets the attributes that layers look for.
        find_place: returns the current place, and whether it has no gradient of this step yet.
    """

    def __init__(
        self,
        parameter: torch.nn.Parameter,
        dummy_wgrads: DummyWgrads,
        find_place: Callable[[], tuple[torch.Tensor, bool]],
    ) -> None:
        self._parameter, self._dummy_wgrads, self.open = parameter, dummy_wgrads, find_place
        attributes = {
            "main_grad_writer": self,
            "__fsdp_param__": True,
            "get_main_grad": self._open_for_upstream,
            "grad_added_to_main_grad": False,
        }
        for name, value in attributes.items():
            setattr(parameter, name, value)

    def dummy_wgrad(self) -> torch.Tensor:
        """Return a dummy gradient for autograd: the real gradient is already in main_grad."""
        return self._dummy_wgrads.like(self._parameter)

    def _open_for_upstream(self) -> torch.Tensor:
        place, is_first = self.open()
        if is_first:
            # With fp8 GEMMs, TE's layer with a norm reads the mark from the fp8 copy of the weight
            # (layernorm_linear.py:871), which has no mark. The layer then adds.
            place.zero_()
        self._parameter.overwrite_main_grad = is_first  # type: ignore[attr-defined]
        return place

    def take_note(self, gradient: torch.Tensor) -> bool:
        """Return whether autograd's gradient is already in its place; call once for each gradient."""
        is_added = self._parameter.grad_added_to_main_grad  # type: ignore[attr-defined]
        self.reset()
        return is_added or self._dummy_wgrads.contain(gradient)

    def reset(self) -> None:
        """Drop a gradient whose backward an error ended."""
        self._parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
