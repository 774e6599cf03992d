"""The scales of Transformer Engine's 8-bit products: which they are, and delayed ones from a checkpoint.

With delayed scaling a layer's scales come from earlier steps, so a run that goes on needs them. TE puts them
into a checkpoint as a pickle (`_extra_state`, transformer_engine/pytorch/module/base.py:808-873), which could
run code when TE reads it (887). So TE never gets a stored pickle: the tensors are read here without running
anything, checked, and given to TE in one made anew.

Current scaling has no such state, and weights do not depend on it: a model without TE ignores it.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule

from patch.compat.unpickle import unpickle_tensors
from patch.config.execution import Execution
from patch.errors import CheckpointError

_KEY = "._extra_state"
_NUM_TENSORS = {"fwd": 3, "bwd": 2}
"""The tensors of a linear layer: input, weight and output in forward; two gradients in backward."""


def scaling_settings(execution: Execution) -> dict[str, Any]:
    """The fields of upstream's configuration for TE's 8-bit products; none for those of other precisions."""
    if execution.precision != "fp8":
        return {}
    fp8 = execution.fp8
    return {
        "fp8": fp8.format,
        "fp8_recipe": fp8.recipe,
        "first_last_layers_bf16": fp8.num_first_in_bf16 + fp8.num_last_in_bf16 > 0,
        "num_layers_at_start_in_bf16": fp8.num_first_in_bf16,
        "num_layers_at_end_in_bf16": fp8.num_last_in_bf16,
        "disable_parameter_transpose_cache": not fp8.keeps_weights,
        # Delayed scaling: over replicas too it would be a collective in each forward and backward, for
        # which a rank that repeats a step, or computes one alone (guards), would wait forever.
        "tp_only_amax_red": True,
    }


def restore_scales(stages: Sequence[LanguageModule], loaded: Mapping[str, Mapping[str, Any]]) -> None:
    """Give the scales of a checkpoint to the layers of a model with delayed scaling; others are left alone.

    Args:
        stages: the pipeline stages of this rank.
        loaded: the section of the model, as `load_checkpoint` returns it for `sharded_weights`.
    Raises:
        CheckpointError: a layer's stored scales are damaged, or those of another kind of layer.
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
    """The scales and largest numbers in a layer's stored state, by TE's names; none in an empty state.

    Args:
        stored: a pickle as uint8 [bytes], or None.
        name: of the layer, for the message.
        history: steps whose largest numbers are kept.
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
            f"the fp8 scales of {name} cannot be read: {error}", field="fp8_recipe"
        ) from error
    if not scales:  # of a recipe without scales
        return {}
    for key, shape in _shapes(history).items():
        tensor = scales.get(key)
        if not isinstance(tensor, torch.Tensor) or tensor.shape != shape or tensor.dtype != torch.float32:
            got = f"{tuple(tensor.shape)} {tensor.dtype}" if isinstance(tensor, torch.Tensor) else "none"
            raise CheckpointError(
                f"{key} of the fp8 scales of {name}: got {got}, expected {tuple(shape)} torch.float32",
                field="fp8_recipe",
            )
    return scales


def _shapes(history: int) -> dict[str, torch.Size]:
    return {
        f"{what}_{way}": torch.Size((*lead, number))
        for way, number in _NUM_TENSORS.items()
        for what, lead in (("scale", ()), ("amax_history", (history,)))
    }
