"""Transformer Engine's fp8 scales: the settings, and the restore of delayed scales from a checkpoint.

With delayed scaling the scales of a layer come from earlier steps, so resume needs them. TE saves them as a
pickle (`_extra_state`, transformer_engine/pytorch/module/base.py:808-873), which could run code when TE loads
it (887). So TE never gets a stored pickle: the tensors are read here without running code, checked, and
passed to TE in a new pickle.

Current scaling has no such state, and the weights do not depend on it. A model without TE ignores it.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule

from patch.compat.unpickle import unpickle_tensors
from patch.config.schema import RunConfig
from patch.errors import CheckpointError

_KEY = "._extra_state"
_NUM_TENSORS = {"fwd": 3, "bwd": 2}
"""Tensors of a linear layer: input, weight and output in forward; two gradients in backward."""


def scaling_settings(config: RunConfig) -> dict[str, Any]:
    """Return the TransformerConfig fields for TE's fp8 products, empty for other precisions."""
    if not config.casts.layers:
        return {}
    first, last = config.bf16_ends
    return {
        "fp8": config.training.fp8_format or "hybrid",
        "fp8_recipe": config.training.fp8_recipe or "tensorwise",
        "first_last_layers_bf16": first + last > 0,
        "num_layers_at_start_in_bf16": first,
        "num_layers_at_end_in_bf16": last,
        "disable_parameter_transpose_cache": not config.casts.are_kept,
        # With delayed scaling, a reduction over replicas too would be a collective in each forward and
        # backward. A rank that repeats a step, or computes a step alone (guards), would hang in it.
        "tp_only_amax_red": True,
    }


def restore_scales(stages: Sequence[LanguageModule], loaded: Mapping[str, Mapping[str, Any]]) -> None:
    """Restore the fp8 scales of a model with delayed scaling; do nothing for other models.

    `loaded` is the model section that `load_checkpoint` returns for `sharded_weights`.

    Raises:
        CheckpointError: a layer's stored scales are damaged, or belong to another kind of layer.
    """
    config = stages[0].config
    if not config.fp8 or config.fp8_recipe != "delayed":
        return
    from megatron.core.fp8_utils import get_fp8_recipe

    for index, stage in enumerate(stages):
        stored = loaded[f"stage{index}"]
        for name, module in stage.named_modules():
            scales = scales_in(stored.get(name + _KEY), name, config.fp8_amax_history_len)
            if scales:
                state = {
                    "recipe": get_fp8_recipe(config),
                    "extra_fp8_variables": {"fp8_checkpoint": True, "num_gemms": 1},
                    **scales,
                }
                contents = bytearray(pickle.dumps(state))
                module.set_extra_state(torch.frombuffer(contents, dtype=torch.uint8))


def scales_in(stored: torch.Tensor | None, name: str, history: int) -> dict[str, torch.Tensor]:
    """Return the scales and amax histories in a layer's stored state, by TE's names; none if the state is
    empty.

    `stored` is a pickle as uint8 [bytes], or None. `history` counts the steps of the amax history.

    Raises:
        CheckpointError: see `restore_scales`.
    """
    if stored is None or not stored.numel():
        return {}
    try:
        found = unpickle_tensors(stored.numpy().tobytes())
        scales = {key: found[key] for key in _shapes(history) if key in found}
    except Exception as error:  # noqa: BLE001 - hostile bytes can make the unpickler raise anything
        raise CheckpointError(
            f"the fp8 scales of {name} cannot be read: {error}; resume from another checkpoint",
            field="fp8_recipe",
        ) from error
    if not scales:  # the recipe has no scales
        return {}
    for key, shape in _shapes(history).items():
        tensor = scales.get(key)
        if not isinstance(tensor, torch.Tensor) or tensor.shape != shape or tensor.dtype != torch.float32:
            got = f"{tuple(tensor.shape)} {tensor.dtype}" if isinstance(tensor, torch.Tensor) else "none"
            raise CheckpointError(
                f"{key} of the fp8 scales of {name}: got {got}, expected {tuple(shape)} torch.float32; the "
                "checkpoint needs the same fp8_recipe and amax history length",
                field="fp8_recipe",
            )
    return scales


def _shapes(history: int) -> dict[str, torch.Size]:
    return {
        f"{what}_{way}": torch.Size((*lead, number))
        for way, number in _NUM_TENSORS.items()
        for what, lead in (("scale", ()), ("amax_history", (history,)))
    }
