"""Random initial weights that are the same at every TP, PP and DP.

Every rank draws the full (unsharded) weight, from a generator seeded by the run's seed and the weight's
global name, and keeps its part. So runs of different layouts start from the same model if they use the same
kind of device; CPUs and GPUs have different generators.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors
from megatron.core.models.gpt.gpt_model import GPTModel

from patch.config.schema import ModelConfig
from patch.model.llama import sharded_weights

# The last projections of attention and MLP get smaller values: arXiv:1909.08053, section 5.1 (after GPT-2).
_SCALED = ("linear_proj.weight", "linear_fc2.weight")
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


def forget_weights(stages: Sequence[GPTModel]) -> None:
    """Free the memory of trainable weights that have no values yet: each becomes one repeated element.

    They get memory again when the optimizer gives them their place in its flat buffer.
    """
    for parameter in (p for stage in stages for p in stage.parameters() if p.requires_grad):
        parameter.data = parameter.new_zeros(1).expand(parameter.shape)


@torch.no_grad()
def initialize_weights(stages: Sequence[GPTModel], model: ModelConfig, seed: int) -> None:
    """Set the weights of a rank's stages: N(0, init_method_std); norms 1, biases and padded rows 0.

    Args:
        stages: all pipeline stages of this rank.
        model: the shape they were built from.
        seed: the run's seed; each weight's generator is seeded by it and by the weight's name.
    """
    state = sharded_weights(stages)
    apply_factories(state)
    for shard in nested_values(extract_sharded_tensors(state)[0]):
        if shard.data.ndim == 1:
            shard.data.fill_(0.0 if shard.key.endswith(".bias") else 1.0)
            continue
        number = shard.prepend_axis_num
        # Of a layer, and of an expert in it.
        place = " ".join(map(str, shard.global_offset[:number])) or "0"
        shape, offset = shard.global_shape[number:], shard.global_offset[number:]
        num_padded = shape[0] - model.vocab_size if shard.key in _VOCABULARY else 0
        shape = (shape[0] - num_padded, *shape[1:])
        whole = _draw(f"{seed} {shard.key} {place}", shape, _std(shard.key, model), shard.data.device)
        if num_padded:
            whole = F.pad(whole, (0, 0, 0, num_padded))
        part = tuple(slice(start, start + size) for start, size in zip(offset, shard.data.shape, strict=True))
        shard.data.copy_(whole[part])


def _std(key: str, model: ModelConfig) -> float:
    std = model.init_method_std
    return std / math.sqrt(2 * model.num_layers) if key.endswith(_SCALED) else std


def _draw(name: str, shape: tuple[int, ...], std: float, device: torch.device) -> torch.Tensor:
    """A full weight of float32 normal values, seeded by the name. A CPU takes 3 s for 1e9 values."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.empty(shape, device=device).normal_(0.0, std, generator=generator)
