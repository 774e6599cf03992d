"""The fields of a model, a part of the run's dataclasses (`schema.py`); each is a flag."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from patch.config.choices import AttentionBackend, HfAttention, RopeScaling, TransformerImpl
from patch.config.flag_field import flag
from patch.families import FAMILIES, MOST_LAYERS


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The shape of a LLaMA-family model. Source of the names: Megatron-LM's arguments."""

    model_size: str = flag("a preset's name, or auto: the shape is read from --load's config.json", "auto")
    num_layers: int = flag("transformer layers", at_least=1, at_most=MOST_LAYERS)
    hidden_size: int = flag("width of the residual stream", at_least=1)
    ffn_hidden_size: int = flag("width of the gated MLP", at_least=1)
    num_attention_heads: int = flag("query heads", at_least=1)
    num_query_groups: int = flag("key/value heads (GQA); equal to the query heads without GQA", at_least=1)
    kv_channels: int = flag("size of one head", at_least=1, multiple_of=2)
    vocab_size: int = flag("rows of the embedding before padding", at_least=1)
    make_vocab_size_divisible_by: int = flag(
        "the vocabulary is padded to a multiple of this", 128, at_least=1
    )
    seq_length: int = flag("tokens of one training sequence", at_least=1)
    max_position_embeddings: int = flag("longest sequence the model claims to handle", at_least=1)
    rotary_base: float = flag(
        "RoPE theta, as --load's model has it (1e4 in LLaMA 1 and 2, 5e5 in LLaMA 3)", above=0
    )
    use_rope_scaling: bool = flag("scale the RoPE frequencies for a longer context", False)
    rope_scaling_type: RopeScaling = flag(
        "how: as LLaMA 3.1, linear, dynamic NTK (for --seq-length above the model's longest), YaRN", "llama3"
    )
    rope_scaling_factor: float = flag("scaled RoPE: how many times the context is extended", 8.0, above=0)
    rope_low_freq_factor: float = flag(
        "llama3 RoPE: wavelengths above original/this are divided", 1.0, above=0
    )
    rope_high_freq_factor: float = flag("llama3 RoPE: wavelengths below original/this are kept", 4.0, above=0)
    rope_original_max_position: int = flag(
        "llama3 and YaRN RoPE: context length before the extension", 8192, at_least=1
    )
    yarn_beta_fast: float = flag(
        "YaRN: channels that turn more often within the original context are kept", 32.0, above=0
    )
    yarn_beta_slow: float = flag(
        "YaRN: channels that turn less often are divided by the factor", 1.0, above=0
    )
    yarn_correction_range_round_to_int: bool = flag("YaRN: the two borders are whole channels", True)
    yarn_attention_factor: float | None = flag(
        "YaRN: factor of RoPE's cosines and sines; 0: 0.1 ln(factor) + 1", None, none=0, at_least=0
    )
    norm_epsilon: float = flag("epsilon inside RMSNorm", 1e-5, above=0)
    add_qkv_bias: bool = flag("biases on queries, keys and values (Qwen 2)", False)
    qk_layernorm: bool = flag("RMSNorm of each query and key head before RoPE (Qwen 3)", False)
    window_size: tuple[int, int] | None = flag(
        "sliding window, LEFT,0: a token attends to itself and LEFT tokens before it; none: to all before it",
        None,
        none="none",
    )
    untie_embeddings_and_output_weights: bool = flag("give the output layer its own weight", False)
    init_method_std: float = flag("standard deviation of random initial weights", 0.008, at_least=0)
    transformer_impl: TransformerImpl | None = flag(
        "layers of transformer_engine, or local: our own; auto: the former if it is installed and possible",
        None,
        none="auto",
    )
    attention_backend: AttentionBackend = flag(
        "attention on CUDA: auto (the fastest), flash (FlashAttention-3; without it as auto), fused (cuDNN "
        "first), unfused (all scores), local (kernels of torch alone); CPU has one",
        "auto",
    )
    precision_align: HfAttention | None = flag(
        "Hugging Face's order of operations, with this attention of transformers; none: the fastest kernels",
        None,
        none="none",
    )

    @property
    def longest_sequence(self) -> int:
        """Tokens that RoPE serves: linear and dynamic scaling extend `max_position_embeddings`.

        The other types have the extended length there.
        """
        extends = self.use_rope_scaling and self.rope_scaling_type in ("linear", "dynamic")
        return int(self.max_position_embeddings * max(self.rope_scaling_factor if extends else 1.0, 1.0))

    def padded_vocab_size(self, tp_size: int) -> int:
        """Rows of the embedding, padded so that this TP size divides them."""
        multiple = self.make_vocab_size_divisible_by
        if multiple % tp_size:
            multiple *= tp_size
        return -(-self.vocab_size // multiple) * multiple


PRESETS: dict[str, dict[str, Any]] = {
    size: dict(fields) for family in FAMILIES.values() for size, fields in family.presets.items()
}
"""MODEL_SIZE -> ModelConfig's fields; a field that a preset leaves out keeps its default."""
MODEL_SIZES: tuple[str, ...] = (*PRESETS, "auto")
REQUIRED_SHAPE: frozenset[str] = frozenset(
    {"num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size"}
)
"""Fields that the user must give if neither a preset nor a config.json sets them."""
SHAPE_FIELDS: frozenset[str] = frozenset(PRESETS["8B"])
"""All fields that a preset sets; a change of MODEL_SIZE replaces all of them."""
