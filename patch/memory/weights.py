"""Tells weights from activations among the tensors that autograd saves."""

from __future__ import annotations

import torch


def is_weight(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a parameter or a view of one."""
    return isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter)
