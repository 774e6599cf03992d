"""The LLaMA model on megatron-core's TransformerBlock; see README.md."""

from patch.config.execution import Execution
from patch.model.hf_order import SOURCES, sources_of
from patch.model.llama import (
    WEIGHT_PREFIXES,
    LlamaModel,
    build_llama_model,
    sharded_weights,
    unchanged_weights,
)
from patch.model.loss import LearnedTokens, ScoredTokens, sum_aligned
from patch.model.packed_sequences import PackedSequences
from patch.model.weight_init import forget_weights, forgetting_weights, initialize_weights

__all__ = [
    "SOURCES",
    "WEIGHT_PREFIXES",
    "Execution",
    "LearnedTokens",
    "LlamaModel",
    "PackedSequences",
    "ScoredTokens",
    "build_llama_model",
    "forget_weights",
    "forgetting_weights",
    "initialize_weights",
    "sharded_weights",
    "sources_of",
    "sum_aligned",
    "unchanged_weights",
]
