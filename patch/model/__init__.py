"""The LLaMA model on megatron-core's TransformerBlock; see README.md."""

from patch.model.attention.packed_sequences import PackedSequences
from patch.model.hf_numerics.layers import SOURCES, sources_of
from patch.model.llama import (
    WEIGHT_PREFIXES,
    LlamaModel,
    build_llama_model,
    sharded_weights,
    unchanged_weights,
)
from patch.model.loss import LikeliestTokens, LossMask, ScoredTokens, TeacherTokens, sum_aligned
from patch.model.weight_init import forget_weights, forgetting_weights, initialize_weights

__all__ = [
    "SOURCES",
    "WEIGHT_PREFIXES",
    "LikeliestTokens",
    "LossMask",
    "LlamaModel",
    "PackedSequences",
    "ScoredTokens",
    "TeacherTokens",
    "build_llama_model",
    "forget_weights",
    "forgetting_weights",
    "initialize_weights",
    "sharded_weights",
    "sources_of",
    "sum_aligned",
    "unchanged_weights",
]
