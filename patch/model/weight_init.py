"""Random initial weights that do not depend on TP, PP and DP.

Every rank draws the full weight, from a generator seeded by the run's seed and the weight's global name, and
keeps its shard. So runs of different layouts start from the same model on the same kind of device; the
generators of CPUs and GPUs differ.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors
from megatron.core.models.common.language_module.language_module import LanguageModule
from torch.nn.modules.module import register_module_module_registration_hook

from patch.config.schema import ModelConfig
from patch.families import traits_of
from patch.families.adapters import INSIDE, SECOND_FACTOR
from patch.families.weights import EMBEDDING_PARAMETER, TIED_OUTPUT
from patch.model.llama import sharded_weights
from patch.model.nf4_product import dense_shape, scale_table, write

# The last projections of attention and MLP get smaller values: arXiv:1909.08053, section 5.1 (after GPT-2).
_SCALED = ("linear_proj.weight", "linear_fc2.weight")
_VOCABULARY = (EMBEDDING_PARAMETER, TIED_OUTPUT)


def forget_weights(stages: Sequence[LanguageModule]) -> None:
    """Free the memory of trainable weights that are not yet initialized: each becomes one expanded element.

    The optimizer allocates their memory again in its flat buffer.
    """
    for stage in stages:
        _forget(stage)


def _forget(module: torch.nn.Module, least: int = 0) -> None:
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.numel() >= least:
            parameter.data = parameter.new_zeros(1).expand(parameter.shape)


@contextmanager
def forgetting_weights(least: int) -> Iterator[None]:
    """Context for building models: weights of at least `least` elements are freed when their module is
    registered.
    """

    def forget(module: torch.nn.Module, name: str, part: torch.nn.Module | None) -> None:
        if part is not None:
            _forget(part, least)

    handle = register_module_module_registration_hook(forget)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def initialize_weights(
    stages: Sequence[LanguageModule],
    model: ModelConfig,
    seed: int,
    *,
    adapters: bool | None = None,
    visit: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """Set the weights of a rank's stages: N(0, init_method_std); norms 1, biases and padded rows 0.
    Norms that multiply by 1 + weight get 0.

    With `init_method_xavier_uniform` the embedding is uniform with Glorot and Bengio's deviation. Adapters
    start as in PEFT: A uniform within +-1 / sqrt(inputs), B 0. An nf4 weight gets its quantized values.

    Args:
        adapters: see `sharded_weights`.
        visit: returns the tensor to write for a weight (the optimizer's `meta_weights`).
    """
    is_zero_centered = traits_of(model).layernorm_zero_centered_gamma
    state = sharded_weights(stages, adapters=adapters)
    apply_factories(state)
    for shard in nested_values(extract_sharded_tensors(state)[0]):
        if visit is not None:
            shard.data = visit(shard.data)
        if shard.data.ndim == 1:
            is_zero = shard.key.endswith("bias") or is_zero_centered  # or `layer_norm_bias`
            shard.data.fill_(0.0 if is_zero else 1.0)
            continue
        number = shard.prepend_axis_num
        place = " ".join(map(str, shard.global_offset[:number])) or "0"  # layer, and expert
        shape, offset = shard.global_shape[number:], shard.global_offset[number:]
        own = dense_shape(shard.data)
        if own != shard.data.shape:  # the columns count bytes
            shape, offset = ((n, m * own[1] // shard.data.shape[1]) for n, m in (shape, offset))
        num_padded = shape[0] - model.vocab_size if shard.key in _VOCABULARY else 0
        shape = (shape[0] - num_padded, *shape[1:])
        if shard.key.endswith(SECOND_FACTOR):
            shard.data.zero_()
            continue
        is_uniform, std = _spread(shard.key, shape, model)
        name, device = f"{seed} {shard.key} {place}", shard.data.device
        whole = _draw(name, shape, std, device, is_uniform=is_uniform)
        if num_padded:
            whole = F.pad(whole, (0, 0, 0, num_padded))
        part = tuple(slice(start, start + size) for start, size in zip(offset, own, strict=True))
        write(shard.data, whole[part], partial(_part_of_scales, whole, part))


def _part_of_scales(whole: torch.Tensor, part: tuple[slice, ...]) -> torch.Tensor:
    rows, columns = part
    return scale_table(whole)[rows, columns.start // 16 : columns.stop // 16]


def _spread(key: str, shape: tuple[int, ...], model: ModelConfig) -> tuple[bool, float]:
    if INSIDE in key:
        return True, 1 / math.sqrt(3 * shape[1])  # PEFT's: kaiming_uniform_ with a = sqrt(5)
    if key == EMBEDDING_PARAMETER and model.init_method_xavier_uniform:
        return True, math.sqrt(2 / sum(shape))
    std = model.init_method_std
    return False, std / math.sqrt(2 * model.num_layers) if key.endswith(_SCALED) else std


def _draw(
    name: str, shape: tuple[int, ...], std: float, device: torch.device, *, is_uniform: bool
) -> torch.Tensor:
    """Return a full float32 weight, seeded by its name. A CPU takes 3 s for 1e9 values."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    if is_uniform:
        largest = math.sqrt(3) * std
        return torch.empty(shape, device=device).uniform_(-largest, largest, generator=generator)
    return torch.empty(shape, device=device).normal_(0.0, std, generator=generator)
