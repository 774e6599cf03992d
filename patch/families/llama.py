"""LLaMA 1 to 3.3: the family and its public sizes.

Sources of the sizes: the config.json that Meta publishes with each model on Hugging Face; for LLaMA 1 its
paper (arXiv 2302.13971, table 2) and params.json, where the norm's epsilon is 1e-6 but 1e-5 at 65B.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from patch.families.family import Family
from patch.families.shape import Traits


class _Size(NamedTuple):
    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int


def _shape(size: _Size, vocab_size: int, max_position: int, norm_epsilon: float) -> dict[str, Any]:
    return {
        "num_layers": size.layers,
        "hidden_size": size.hidden,
        "ffn_hidden_size": size.ffn,
        "num_attention_heads": size.heads,
        "num_query_groups": size.groups,
        "kv_channels": size.hidden // size.heads,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_position,
        "norm_epsilon": norm_epsilon,
    }


def _llama3(size: _Size, factor: float, tied: bool) -> dict[str, Any]:
    """LLaMA 3.1 and 3.2: RoPE scaling to 128 Ki tokens; the small 3.2 models have tied embeddings.

    The other fields of the scaling have ModelConfig's defaults, which are LLaMA 3.1's.
    """
    return {
        **_shape(size, vocab_size=128256, max_position=131072, norm_epsilon=1e-5),
        "rotary_base": 500000.0,
        "use_rope_scaling": True,
        "rope_scaling_factor": factor,
        "untie_embeddings_and_output_weights": not tied,
    }


def _llama12(size: _Size, max_position: int, norm_epsilon: float) -> dict[str, Any]:
    return {
        **_shape(size, vocab_size=32000, max_position=max_position, norm_epsilon=norm_epsilon),
        "rotary_base": 10000.0,
        "untie_embeddings_and_output_weights": True,
    }


_PRESETS: dict[str, dict[str, Any]] = {
    # LLaMA 3.1 in miniature; it keeps the vocabulary, so that every LLaMA-3 tokenizer fits it
    "tiny": _llama3(_Size(2, 64, 192, 4, 2), factor=8.0, tied=False),
    "1B": _llama3(_Size(16, 2048, 8192, 32, 8), factor=32.0, tied=True),
    "3B": _llama3(_Size(28, 3072, 8192, 24, 8), factor=32.0, tied=True),
    "8B": _llama3(_Size(32, 4096, 14336, 32, 8), factor=8.0, tied=False),
    "70B": _llama3(_Size(80, 8192, 28672, 64, 8), factor=8.0, tied=False),
    "405B": _llama3(_Size(126, 16384, 53248, 128, 8), factor=8.0, tied=False),
    "llama2-7B": _llama12(_Size(32, 4096, 11008, 32, 32), max_position=4096, norm_epsilon=1e-5),
    "llama2-13B": _llama12(_Size(40, 5120, 13824, 40, 40), max_position=4096, norm_epsilon=1e-5),
    "llama2-70B": _llama12(_Size(80, 8192, 28672, 64, 8), max_position=4096, norm_epsilon=1e-5),
    "llama1-7B": _llama12(_Size(32, 4096, 11008, 32, 32), max_position=2048, norm_epsilon=1e-6),
    "llama1-13B": _llama12(_Size(40, 5120, 13824, 40, 40), max_position=2048, norm_epsilon=1e-6),
    "llama1-30B": _llama12(_Size(60, 6656, 17920, 52, 52), max_position=2048, norm_epsilon=1e-6),
    "llama1-65B": _llama12(_Size(80, 8192, 22016, 64, 64), max_position=2048, norm_epsilon=1e-5),
}

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    traits=Traits(),
    defaults={"max_position_embeddings": 2048},
    slides=None,
    type_keys=lambda model: {"attention_bias": False, "mlp_bias": False},
    presets=_PRESETS,
)
