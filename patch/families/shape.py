"""ModelConfig, the shape of a model with its fields as flags; the traits of layers; sets of field names."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from patch.flag_field import flag

RopeScaling = Literal["llama3", "linear", "dynamic", "yarn"]
"""Scaling of RoPE's frequencies for longer contexts: `rope_type` of transformers."""

HfAttention = Literal["eager", "sdpa"]
"""`attn_implementation` of transformers."""

AttentionBackend = Literal["auto", "flash", "fused", "unfused", "local"]
"""Attention kernel on CUDA: megatron-core's `AttnBackend`. See `patch.features.backends`."""

RouterScore = Literal["softmax", "sigmoid"]
"""Function that a router applies to its logits: megatron-core's `moe_router_score_function`."""

PositionEmbedding = Literal["rope", "alibi"]
"""megatron-core's `position_embedding_type`, as far as it is built."""

TransformerImpl = Literal["transformer_engine", "local"]
"""Transformer Engine's layers, or this project's layers; Megatron-LM's names."""

Window = tuple[int, int] | None
"""Tokens to the left and right that a token attends to, or None for all tokens before it."""

UNUSED_ROTARY_BASE = 10000.0
"""`rotary_base` of a model without RoPE."""

ALIBI_POSITIONS = 2**16
"""Longest sequence of a model with ALiBi: later positions are not exact in bf16 and fp16."""

MOST_LAYERS = 10_000
"""Most layers of a model: the plan, the weight table and a pipeline have an entry per layer."""

MOST_EXPERTS = 1024
"""Most experts of a layer: the weight table has an entry per expert."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The architecture of a model. Source of the names: Megatron-LM's arguments."""

    model_size: str = flag("a preset's name, or auto: the shape is read from --load's config.json", "auto")
    model_type: str | None = flag(
        "its family, as config.json names it; auto: that of the preset, of --load's model, or the first that "
        "computes the shape",
        none="auto",
    )
    num_layers: int = flag("transformer layers", at_least=1, at_most=MOST_LAYERS)
    hidden_size: int = flag("width of the residual stream", at_least=1)
    ffn_hidden_size: int = flag("width of the MLP", at_least=1)
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
        "YaRN: factor of RoPE's cosines and sines; 0: 0.1 ln(factor) + 1", none=0
    )
    mscale: float | None = flag(
        "YaRN: cosines and sines get (0.1 mscale ln(factor) + 1) over the same of --mscale-all-dim; 0: none",
        none=0,
    )
    mscale_all_dim: float | None = flag(
        "YaRN, latent attention: scores get (0.1 mscale-all-dim ln(factor) + 1) squared; 0: none", none=0
    )
    norm_epsilon: float = flag("epsilon inside the norms", 1e-5, above=0)
    add_qkv_bias: bool = flag("biases on queries, keys and values (Qwen 2)", False)
    add_proj_bias: bool = flag("a bias on attention's output", False)
    add_mlp_bias: bool = flag("biases of the MLPs", False)
    qk_layernorm: bool = flag("RMSNorm of each query and key head before RoPE (Qwen 3)", False)
    window_size: Window = flag(
        "sliding window, LEFT,0: a token attends to itself and LEFT tokens before it; none: to all before it",
        none="none",
    )
    window_attn_skip_freq: str | None = flag(
        "layers without the window: N every Nth; or a list such as ([1]*5+[0])*4 with 0 for these layers; "
        "none: all layers have it",
        none="none",
    )
    position_embedding_type: PositionEmbedding | None = flag(
        "rope, or alibi: a slope of the scores for each head; auto: the family's", none="auto"
    )
    rotary_percent: float = flag("share of a head's channels that RoPE rotates", 1.0, above=0, at_most=1)
    rotary_base_local: float | None = flag(
        "RoPE theta of the layers with the window, unscaled; 0: their RoPE is that of other layers", none=0
    )
    no_rope_freq: str | None = flag(
        "layers without RoPE: N every Nth; or a list such as ([0]*3+[1])*6 with 1 for these layers; none: "
        "all have it",
        none="none",
    )
    llama_4_scaling_beta: float | None = flag(
        "queries at position p get 1 + beta ln(1 + floor(p / --rope-original-max-position)); 0: none", none=0
    )
    softmax_scale: float | None = flag(
        "factor of the attention scores; 0: 1 / sqrt(--kv-channels)", none=0
    )
    embedding_multiplier: float = flag("factor of the embedding's output", 1.0, above=0)
    residual_multiplier: float = flag("factor of what attention and MLP add to the stream", 1.0, above=0)
    logits_scaling: float = flag("divisor of the logits", 1.0, above=0)
    normalize_output_weight: bool = flag("divide each row of the output layer's weight by its norm", False)
    attn_logit_softcapping: float | None = flag(
        "attention scores s become cap * tanh(s / cap), from all scores; 0: no cap", none=0
    )
    final_logit_softcapping: float | None = flag("the same for the logits; 0: no cap", none=0)
    kv_lora_rank: int | None = flag(
        "multi-latent attention (DeepSeek): rank of the compressed KV latent; 0: other attention", none=0
    )
    q_lora_rank: int | None = flag(
        "latent attention: rank of the compressed query latent; 0: queries are not compressed", none=0
    )
    qk_head_dim: int | None = flag(
        "latent attention: channels of a query's and key's head without RoPE", none=0
    )
    qk_pos_emb_head_dim: int | None = flag(
        "latent attention: channels of a query's head with RoPE; all heads share the key's RoPE channels",
        none=0,
        multiple_of=2,
    )
    v_head_dim: int | None = flag("latent attention: channels of a value's head", none=0, multiple_of=2)
    num_experts: int | None = flag(
        "experts of a layer, in place of its MLP; 0: no layer has experts", none=0, at_most=MOST_EXPERTS
    )
    moe_router_topk: int = flag("experts that a token visits", 2, at_least=1)
    moe_ffn_hidden_size: int | None = flag("width of an expert; 0: --ffn-hidden-size", none=0)
    moe_layer_freq: str = flag(
        "which layers have experts: 1 all, N every Nth from the first on, or such as [0]*1+[1]*26: the first "
        "has none",
        "1",
    )
    moe_shared_expert_intermediate_size: int | None = flag(
        "total width of the shared experts, which every token visits; 0: there are none", none=0
    )
    moe_shared_expert_gate: bool = flag("their result is multiplied by a sigmoid of the token", False)
    moe_router_score_function: RouterScore = flag("score function of the router logits", "softmax")
    moe_router_pre_softmax: bool = flag(
        "softmax over all experts, not over those that a token visits: their weights do not sum to one", False
    )
    moe_router_topk_scaling_factor: float | None = flag(
        "factor of the weights of a token's experts; 0: none", none=0
    )
    moe_router_num_groups: int | None = flag(
        "number of expert groups for group-limited routing; 0: no groups", none=0
    )
    moe_router_group_topk: int | None = flag("groups that a token visits; 0: all", none=0)
    moe_router_enable_expert_bias: bool = flag(
        "choose experts by sigmoid score plus a bias that follows their load (DeepSeek-V3)", False
    )
    untie_embeddings_and_output_weights: bool = flag("give the output layer its own weight", False)
    init_method_std: float = flag("standard deviation of random initial weights", 0.008, at_least=0)
    init_method_xavier_uniform: bool = flag(
        "draw the embedding's initial weights (not others) from Xavier's uniform distribution",
        False,
    )
    transformer_impl: TransformerImpl | None = flag(
        "layers of transformer_engine, or local: our own; auto: the former if it is installed and possible",
        none="auto",
    )
    attention_backend: AttentionBackend = flag(
        "attention on CUDA: auto (the fastest), flash (FlashAttention-3; without it as auto), fused (cuDNN "
        "first), unfused (all scores), local (kernels of torch alone); CPU has one",
        "auto",
    )
    precision_align: HfAttention | None = flag(
        "Hugging Face's order of operations, with this attention of transformers; none: the fastest kernels",
        none="none",
    )

    @property
    def own_fields(self) -> list[str]:
        """Names of OWN_FIELDS that have an effect."""
        return [name for name, default in OWN_FIELDS.items() if getattr(self, name) != default]

    @property
    def is_latent(self) -> bool:
        """Whether attention keeps keys and values as latents (DeepSeek-V2)."""
        return self.kv_lora_rank is not None

    @property
    def longest_sequence(self) -> int:
        """Tokens that RoPE serves; linear and dynamic scaling extend `max_position_embeddings`."""
        extends = self.use_rope_scaling and self.rope_scaling_type in ("linear", "dynamic")
        return int(self.max_position_embeddings * max(self.rope_scaling_factor if extends else 1.0, 1.0))

    @property
    def rotary_channels(self) -> int:
        """Channels of a head that RoPE rotates."""
        return self.qk_pos_emb_head_dim or int(self.kv_channels * self.rotary_percent)

    @property
    def value_channels(self) -> int:
        """Channels of a head's value, and of its attention output."""
        return self.v_head_dim or self.kv_channels

    @property
    def expert_width(self) -> int:
        """Width of one expert."""
        return self.moe_ffn_hidden_size or self.ffn_hidden_size

    def padded_vocab_size(self, tp_size: int) -> int:
        """Return the rows of the embedding, padded so that TP divides them."""
        multiple = self.make_vocab_size_divisible_by
        if multiple % tp_size:
            multiple *= tp_size
        return -(-self.vocab_size // multiple) * multiple


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The components of a model's layers. Names and values are those of megatron-core's TransformerConfig.

    A `Literal` with one value means that `patch/model` can build only this value. A family that needs another
    value adds it to the type; mypy then shows the places that must handle it. A trait that is also a field of
    ModelConfig is a flag: a model may differ from its family. Numbers that differ between the models of a
    family are fields of ModelConfig alone (OWN_FIELDS); `Family.own_fields` names them.
    """

    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    """LayerNorm has a bias beside its weight."""
    activation: str = "silu"
    """Activation of the MLP, spelled as in config.json's `hidden_act`."""
    gated_linear_unit: bool = True
    """Whether the MLP multiplies the activation by a second projection (`up`)."""
    add_bias_linear: bool = False
    add_qkv_bias: bool = False
    """Biases on queries, keys and values only."""
    qk_layernorm: bool = False
    qk_norm_of: Literal["head", "all heads"] = "head"
    """Whether a norm of queries and keys is computed for each head, or for all heads together."""
    norm_placement: Literal["before", "behind", "both"] = "before"
    """Where attention and MLP have a norm: before them, behind them (before the residual sum), or both."""
    layernorm_zero_centered_gamma: bool = False
    """Whether norms multiply by 1 + weight."""
    rotary_interleaved: bool = False
    """Whether RoPE rotates neighboring channels, not a channel and one half a head away."""
    position_embedding_type: PositionEmbedding = "rope"
    embedding_norm: bool = False
    """A norm between the embedding and the first layer."""

    @property
    def has_rope(self) -> bool:
        """Whether RoPE rotates queries and keys."""
        return self.position_embedding_type == "rope"

    @property
    def position_channels(self) -> int:
        """Channels that ALiBi adds to each head of queries, keys and values.

        ALiBi uses 6 of the 8; with 8 the head size stays one that attention kernels support.
        """
        return 0 if self.has_rope else 8

    @property
    def is_llama_like(self) -> bool:
        """Whether Transformer Engine's layers can be built, if the model has no OWN_FIELDS."""
        free = "activation", "gated_linear_unit", "add_qkv_bias", "qk_layernorm", "embedding_norm"
        return self == Traits(**{name: getattr(self, name) for name in free})

    @property
    def is_bloom_like(self) -> bool:
        """Whether the layers have BLOOM's operations in BLOOM's order."""
        return not (self.has_rope or self.gated_linear_unit) and (
            (self.normalization, self.activation, self.add_bias_linear)
            == ("LayerNorm", "gelu_pytorch_tanh", True)
        )


def preset(
    layers: int, hidden: int, ffn: int, heads: int, groups: int | None = None, **own: Any
) -> dict[str, Any]:
    """Return ModelConfig's fields of a public model; by default without GQA, head size hidden / heads."""
    return {
        "num_layers": layers, "hidden_size": hidden, "ffn_hidden_size": ffn, "num_attention_heads": heads,
        "num_query_groups": groups or heads, "kv_channels": hidden // heads, **own,
    }  # fmt: skip


SHAPE_FIELDS: frozenset[str] = frozenset(field.name for field in fields(ModelConfig)) - {
    *("model_size", "seq_length", "make_vocab_size_divisible_by", "init_method_std"),
    *("transformer_impl", "attention_backend", "precision_align", "init_method_xavier_uniform"),
}
"""All fields that a MODEL_SIZE decides; a change of MODEL_SIZE replaces all of them."""

EXPERT_FIELDS: frozenset[str] = frozenset(
    name for name in SHAPE_FIELDS if name == "num_experts" or name.startswith("moe_")
)
"""Fields of experts; stored runs of versions without experts lack these fields."""

LATENT_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
LATENT_FIELDS: frozenset[str] = frozenset({*LATENT_SIZES, "mscale", "mscale_all_dim"})
"""Fields of latent attention; stored runs of earlier versions lack these fields."""

TRAIT_FIELDS: frozenset[str] = frozenset({"add_qkv_bias", "qk_layernorm"})
"""Traits that are flags; the family decides them if no flag does."""

OWN_FIELDS: dict[str, Any] = {
    field.name: field.default
    for field in fields(ModelConfig)
    if field.name in {
        "window_attn_skip_freq", "rotary_percent", "rotary_base_local", "no_rope_freq",
        "llama_4_scaling_beta", "softmax_scale", "embedding_multiplier", "residual_multiplier",
        "logits_scaling", "attn_logit_softcapping", "final_logit_softcapping", "normalize_output_weight",
        "add_proj_bias", "add_mlp_bias",
    }
}  # fmt: skip
"""Fields that only some families have, and their values without effect; earlier runs lack these fields."""
