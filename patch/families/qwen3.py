"""Qwen 3, dense models: LLaMA's layers with an RMSNorm of each query and key head.

The other keys of config.json are those of Qwen 2.
"""

from __future__ import annotations

from patch.families.llama_like import LlamaLike
from patch.families.qwen2 import QWEN2, slides, window_keys
from patch.families.shape import Traits

QWEN3 = LlamaLike(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    traits=Traits(qk_layernorm=True),
    defaults={**QWEN2.defaults, "head_dim": 128},
    slides=slides,
    type_keys=window_keys,
)
