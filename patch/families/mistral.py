"""Mistral, dense models: LLaMA's layers; in version 0.1 all of them have a sliding window."""

from __future__ import annotations

from patch.families.llama_like import LlamaLike, window_length
from patch.families.shape import Traits

MISTRAL = LlamaLike(
    model_type="mistral",
    architecture="MistralForCausalLM",
    traits=Traits(),
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    slides=lambda config: True,
    type_keys=lambda model: {"sliding_window": window_length(model)},
)
