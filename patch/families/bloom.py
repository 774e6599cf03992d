"""BLOOM: ALiBi, LayerNorms (one after the embedding), biases everywhere, an MLP without a gate.

Its weights have their own names. The merged query_key_value has the rows of each head's query, key and value
in turn, which is megatron-core's order. Sources of the sizes: the config.json that BigScience publishes with
each model. The tokenizer has 250,680 words; the embedding is padded to 250,880 rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any

from patch.families.config_json import ConfigReader, set_keys
from patch.families.family import Family
from patch.families.shape import ALIBI_POSITIONS, UNUSED_ROTARY_BASE, ModelConfig, Traits, preset
from patch.families.weights import EMBEDDING_PARAMETER, TIED_OUTPUT, Kind, Part, WeightRow

_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "n_layer",
    "num_attention_heads": "n_head",
    "norm_epsilon": "layer_norm_epsilon",
}

class _Bloom(Family):
    def read_config(self, config: ConfigReader) -> dict[str, Any]:
        """The MLP has four times the hidden width; keys of other names are passed on as Family's keys."""
        of_llama = {
            "num_hidden_layers": config.values["n_layer"],
            "num_attention_heads": config.values["n_head"],
            "intermediate_size": 4 * config.integer("hidden_size"),
            "rms_norm_eps": config.number("layer_norm_epsilon"),
            "max_position_embeddings": ALIBI_POSITIONS,
            "tie_word_embeddings": config.boolean("tie_word_embeddings", True),
        }
        return super().read_config(ConfigReader(config.file, {**config.values, **of_llama}))

    def write_type(self, described: dict[str, Any], model: ModelConfig) -> None:
        """BLOOM's class has one activation, which no key names."""
        super().write_type(described, model)
        described.pop("hidden_act")

    def write_shape(self, described: dict[str, Any], model: ModelConfig, fields: Set[str]) -> None:
        changed = {key: getattr(model, field) for field, key in _KEYS.items() if field in fields}
        set_keys(described, self.model_type, changed)
        if "untie_embeddings_and_output_weights" in fields:
            described["tie_word_embeddings"] = not model.untie_embeddings_and_output_weights

    def computes(self, model: ModelConfig) -> bool:
        """BLOOM's class has no grouped heads; its only widths are hidden and 4 x hidden."""
        hidden, heads = model.hidden_size, model.num_attention_heads
        if not super().computes(model):
            return False
        has_its_widths = model.ffn_hidden_size == 4 * hidden and model.kv_channels * heads == hidden
        return has_its_widths and model.num_query_groups == heads


def _rows(model: ModelConfig, traits: Traits) -> tuple[WeightRow, ...]:
    """Parameters in the order in which Hugging Face stores them; flags add no rows."""
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    query = model.num_attention_heads * model.kv_channels
    qkv = query + 2 * model.num_query_groups * model.kv_channels

    def rows(ours: str, theirs: str, part: Part, kind: Kind, shape: tuple[int, ...]) -> Iterator[WeightRow]:
        """A weight and its bias; TP cuts the bias if it cuts the rows of the weight."""
        layers = range(model.num_layers if "*" in ours else 1)
        weight = {f"transformer.{theirs}.weight": shape}
        yield WeightRow(f"{ours}.weight", part, kind, weight, layers=layers)
        kind = Kind.REPLICATED if kind is Kind.ROW_PARALLEL else kind
        bias = {f"transformer.{theirs}.bias": shape[:1]}
        yield WeightRow(f"{ours}.bias", part, kind, bias, layers=layers)

    def norm(ours: str, theirs: str) -> Iterator[WeightRow]:
        return rows(ours, theirs, "norm", Kind.REPLICATED, (hidden,))

    def matrix(ours: str, theirs: str, part: Part, kind: Kind, *shape: int) -> Iterator[WeightRow]:
        return rows(f"decoder.layers.*.{ours}", f"h.*.{theirs}", part, kind, shape)

    table = (model.vocab_size, hidden)
    embedding = {"transformer.word_embeddings.weight": table}
    output = {"lm_head.weight": table} if model.untie_embeddings_and_output_weights else embedding
    cut, joined = Kind.COLUMN_PARALLEL, Kind.ROW_PARALLEL
    return (
        WeightRow(EMBEDDING_PARAMETER, "embedding", Kind.VOCAB_PARALLEL, embedding),
        *norm("embedding.norm", "word_embeddings_layernorm"),
        *norm("decoder.layers.*.input_layernorm", "h.*.input_layernorm"),
        *matrix("self_attention.linear_qkv", "self_attention.query_key_value", "attention", cut, qkv, hidden),
        *matrix("self_attention.linear_proj", "self_attention.dense", "attention", joined, hidden, query),
        *norm("decoder.layers.*.pre_mlp_layernorm", "h.*.post_attention_layernorm"),
        *matrix("mlp.linear_fc1", "mlp.dense_h_to_4h", "mlp", cut, ffn, hidden),
        *matrix("mlp.linear_fc2", "mlp.dense_4h_to_h", "mlp", joined, hidden, ffn),
        *norm("decoder.final_layernorm", "ln_f"),
        WeightRow(TIED_OUTPUT, "head", Kind.VOCAB_PARALLEL, output),
    )


def _preset(num_layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return preset(
        num_layers, hidden, 4 * hidden, heads, vocab_size=250_880, norm_epsilon=1e-5,
        max_position_embeddings=ALIBI_POSITIONS, rotary_base=UNUSED_ROTARY_BASE,
    )  # fmt: skip


BLOOM = _Bloom(
    model_type="bloom",
    architecture="BloomForCausalLM",
    traits=Traits(
        normalization="LayerNorm",
        activation="gelu_pytorch_tanh",
        gated_linear_unit=False,
        add_bias_linear=True,
        position_embedding_type="alibi",
        embedding_norm=True,
    ),
    rows=_rows,
    presets={
        "bloom-560m": _preset(24, 1024, 16),
        "bloom-1b1": _preset(24, 1536, 16),
        "bloom-1b7": _preset(24, 2048, 16),
        "bloom-3b": _preset(30, 2560, 32),
        "bloom-7b1": _preset(30, 4096, 32),
        "bloom-176b": _preset(70, 14336, 112),
    },
)  # fmt: skip

ALL = (BLOOM,)
