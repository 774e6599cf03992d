"""The dense families: LLaMA 1 to 3.3 with its public sizes; Mistral, Qwen 2, 2.5 and 3.

Mistral and Qwen have LLaMA's layers, optionally with a sliding window. Sources of LLaMA's sizes: the
config.json that Meta publishes with each model on Hugging Face. For LLaMA 1: its paper (arXiv 2302.13971,
table 2) and params.json, where the norm's epsilon is 1e-6, but 1e-5 at 65B.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from patch.families.family import ATTENTION_BIAS, BIASES, Family
from patch.families.shape import ModelConfig, Traits, preset


def _llama3(size: Sequence[int], factor: float, tied: bool) -> dict[str, Any]:
    """LLaMA 3.1 and 3.2: RoPE scaling to 128 Ki tokens; the small 3.2 models have tied embeddings."""
    return {
        **preset(*size, vocab_size=128256, max_position_embeddings=131072, norm_epsilon=1e-5),
        "rotary_base": 500000.0,
        "use_rope_scaling": True,
        "rope_scaling_factor": factor,
        "untie_embeddings_and_output_weights": not tied,
    }


def _llama12(size: Sequence[int], max_position: int, norm_epsilon: float) -> dict[str, Any]:
    return preset(
        *size, vocab_size=32000, max_position_embeddings=max_position, norm_epsilon=norm_epsilon,
        rotary_base=10000.0, untie_embeddings_and_output_weights=True,
    )  # fmt: skip


_PRESETS: dict[str, dict[str, Any]] = {
    # LLaMA 3.1 in miniature, with its full vocabulary, so that every LLaMA-3 tokenizer fits
    "tiny": _llama3((2, 64, 192, 4, 2), factor=8.0, tied=False),
    "1B": _llama3((16, 2048, 8192, 32, 8), factor=32.0, tied=True),
    "3B": _llama3((28, 3072, 8192, 24, 8), factor=32.0, tied=True),
    "8B": _llama3((32, 4096, 14336, 32, 8), factor=8.0, tied=False),
    "70B": _llama3((80, 8192, 28672, 64, 8), factor=8.0, tied=False),
    "405B": _llama3((126, 16384, 53248, 128, 8), factor=8.0, tied=False),
    "llama2-7B": _llama12((32, 4096, 11008, 32, 32), max_position=4096, norm_epsilon=1e-5),
    "llama2-13B": _llama12((40, 5120, 13824, 40, 40), max_position=4096, norm_epsilon=1e-5),
    "llama2-70B": _llama12((80, 8192, 28672, 64, 8), max_position=4096, norm_epsilon=1e-5),
    "llama1-7B": _llama12((32, 4096, 11008, 32, 32), max_position=2048, norm_epsilon=1e-6),
    "llama1-13B": _llama12((40, 5120, 13824, 40, 40), max_position=2048, norm_epsilon=1e-6),
    "llama1-30B": _llama12((60, 6656, 17920, 52, 52), max_position=2048, norm_epsilon=1e-6),
    "llama1-65B": _llama12((80, 8192, 22016, 64, 64), max_position=2048, norm_epsilon=1e-5),
}

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    switches=BIASES,
    presets=_PRESETS,
)


def _window_keys(model: ModelConfig) -> dict[str, Any]:
    """Keys of the window; layers from number `max_window_layers` on have it."""
    slides = model.window_size is not None
    return {"use_sliding_window": slides, "max_window_layers": 0 if slides else 28}


MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    slides_from=0,
)
"""In version 0.1 all layers have the window."""

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    traits=Traits(add_qkv_bias=True),
    slides_from=28,
    type_keys=_window_keys,
)

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    traits=Traits(qk_layernorm=True),
    switches=ATTENTION_BIAS,
    slides_from=28,
    type_keys=_window_keys,
)

ALL = (LLAMA, MISTRAL, QWEN2, QWEN3)
