"""The weight table as data: which Hugging Face tensors make up a parameter, and how TP splits it.

`patch/convert` copies weights by this table. The formulas of `patch/plan` and the rules read its parts,
shapes and shares in use.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, auto
from typing import Any, Literal, NamedTuple

from patch.families.layers import expert_layers
from patch.families.shape import ModelConfig, Traits

EMBEDDING_PARAMETER = "embedding.word_embeddings.weight"
TIED_OUTPUT = "output_layer.weight"
"""With tied embeddings and PP > 1 this parameter of the last stage is a copy of the embedding."""

OUTPUT = "lm_head.weight"
"""Output layer in transformers; a folder with tied embeddings may also contain it."""

BUFFERS = (".router.expert_bias",)
"""Ends of the names of buffers, which are no parameters, but which files contain."""

Part = Literal["embedding", "attention", "norm", "mlp", "router", "shared expert", "expert", "head"]
"""Part of a model that a parameter belongs to."""
MLP_PARTS: tuple[Part, ...] = ("mlp", "shared expert", "expert")
"""Parts that are MLPs; a layer has an MLP or experts."""


class Kind(Enum):
    """Layout of a parameter, and how tensor parallelism (TP) splits it."""

    REPLICATED = auto()
    """One tensor, complete on every TP rank, such as a norm's weight."""
    COLUMN_PARALLEL = auto()
    """One tensor whose rows are split over TP, as in megatron-core's ColumnParallelLinear; or two tensors,
    gate and up of a gated MLP. A TP rank stores its rows of gate, then its rows of up."""
    ROW_PARALLEL = auto()
    """One tensor whose columns are split over TP, as in megatron-core's RowParallelLinear."""
    VOCAB_PARALLEL = auto()
    """One tensor whose rows are padded to the padded vocabulary and split over TP."""
    QKV = auto()
    """Three tensors. For each key/value group in turn: the rows of its queries, of its key, of its value."""
    JOINED_QKV = auto()
    """The same rows from one tensor: all queries, then all keys, then all values."""
    JOINED_GATE_UP = auto()
    """One tensor: all rows of gate, then of up. A TP rank stores its rows of each, as COLUMN_PARALLEL."""


OTHER_NAMES = {
    f"{theirs}{kind}": f"decoder.{ours}.{kind}"
    for theirs, ours in (
        ("decoder.layers.*.self_attention.linear_qkv.layer_norm_", "layers.*.input_layernorm"),
        ("decoder.layers.*.mlp.linear_fc1.layer_norm_", "layers.*.pre_mlp_layernorm"),
        ("final_layernorm.", "final_layernorm"),
    )
    for kind in ("weight", "bias")
}
"""Other spelling -> name in the table: norms that Transformer Engine fuses with the following linear layer,
and Pai-Megatron-Patch's final norm.
"""


def table_name(name: str) -> str:
    """Return the table's name of a parameter in any spelling (`*` for the layer)."""
    return OTHER_NAMES.get(name, name)


class HFTensor(NamedTuple):
    """Name and shape of a Hugging Face tensor; `*` is the layer's number, `#` the expert's."""

    name: str
    shape: tuple[int, ...]


class WeightRow(NamedTuple):
    """One parameter of the model; `*` is the layer's number, `#` the number of an expert in the layer."""

    name: str
    """megatron-core's name, with global numbers of layers, and numbers of experts in their layer."""
    part: Part
    kind: Kind
    hf: Mapping[str, tuple[int, ...]]
    """Name -> shape of the Hugging Face tensors, in the order that `kind` states."""
    active: float = 1
    """Share of the parameter that a token uses: below 1 for experts."""
    layers: Sequence[int] = range(1)
    """Numbers of the layers that have it; only 0 for a parameter outside of layers."""
    num_experts: int = 1
    """Copies per layer: one for each expert. `hf` has the tensors of one expert."""
    is_buffer: bool = False
    """Whether it is a float32 buffer that no optimizer trains, and no parameter."""

    @property
    def is_per_layer(self) -> bool:
        """Whether layers have this parameter."""
        return "*" in self.name

    @property
    def is_before_layers(self) -> bool:
        """Whether it is on the first pipeline stage, with the embedding."""
        return self.name.startswith("embedding.")

    @property
    def is_matrix(self) -> bool:
        """Whether the parameter is a matrix, not the vector of a norm or a bias."""
        return all(len(shape) > 1 for shape in self.hf.values())

    def tensors(self, layer: int) -> Iterator[HFTensor]:
        """Yield the Hugging Face tensors of one layer's parameter, of all its experts."""
        for expert in range(self.num_experts):
            for name, shape in self.hf.items():
                yield HFTensor(name.replace("*", str(layer)).replace("#", str(expert)), shape)

    @property
    def num_elements(self) -> int:
        """Elements of the unsharded parameter, of all experts of a layer, without padding."""
        return self.num_experts * sum(math.prod(shape) for shape in self.hf.values())

    def shard_shape(self, tp_size: int) -> tuple[int, ...]:
        """Return the shape on one of `tp_size` TP ranks, of one expert, without vocabulary padding.

        The shape of a matrix is [output, input] channels of its product.
        """
        rows, columns = sum(shape[0] for shape in self.hf.values()), next(iter(self.hf.values()))[1:]
        if self.kind is Kind.ROW_PARALLEL:
            return rows, columns[0] // tp_size
        return rows if self.kind is Kind.REPLICATED else rows // tp_size, *columns


def dense_rows(model: ModelConfig, traits: Traits) -> tuple[WeightRow, ...]:
    """Return the parameters of a model with LLaMA's names, in the order in which Hugging Face stores them.

    A tied output layer is included, under the embedding's Hugging Face name.
    """
    table = (model.vocab_size, model.hidden_size)
    output = "lm_head" if model.untie_embeddings_and_output_weights else "model.embed_tokens"
    embedding = {"model.embed_tokens.weight": table}

    def norm(name: str, theirs: str) -> WeightRow:
        return WeightRow(f"{name}.weight", "norm", Kind.REPLICATED, {f"model.{theirs}.weight": table[1:]})

    rows = (
        WeightRow(EMBEDDING_PARAMETER, "embedding", Kind.VOCAB_PARALLEL, embedding),
        *([norm("embedding.norm", "embed_norm")] if traits.embedding_norm else ()),
        *_layer_rows(model, traits),
        norm("decoder.final_layernorm", "norm"),
        WeightRow(TIED_OUTPUT, "head", Kind.VOCAB_PARALLEL, {f"{output}.weight": table}),
    )
    return *rows, *_biases(rows, model, traits)


_BEFORE, _OF_ATTENTION, _OF_MLP = (
    ("input_layernorm", "input_layernorm"),
    ("self_attn_bda.norm", "post_attention_layernorm"),
    ("mlp_bda.norm", "post_feedforward_layernorm"),
)
_NORMS = {
    "before": ([_BEFORE], [("pre_mlp_layernorm", "post_attention_layernorm")]),
    "behind": ([_OF_ATTENTION], [_OF_MLP]),
    "both": ([_BEFORE, _OF_ATTENTION], [("pre_mlp_layernorm", "pre_feedforward_layernorm"), _OF_MLP]),
}
"""`Traits.norm_placement` -> our and Hugging Face's names of the norms of attention and of the MLP."""


def rows_named(
    names: Mapping[str, str],
    model: ModelConfig,
    traits: Traits,
    *,
    joined: Mapping[str, str] | None = None,
    is_grouped: bool = False,
) -> tuple[WeightRow, ...]:
    """Return `dense_rows` with parts of its tensor names replaced by `names`.

    Args:
        joined: name of a tensor -> name of the first of the tensors that it replaces.
        is_grouped: whether joined queries, keys and values have megatron-core's order, group by group.
    """
    qkv = Kind.COLUMN_PARALLEL if is_grouped else Kind.JOINED_QKV

    def renamed(name: str) -> str:
        found = [(theirs, ours) for theirs, ours in names.items() if theirs in name]
        return name.replace(*found[0]) if found else name

    rows = (_join(row, joined or {}, qkv) for row in dense_rows(model, traits))
    return tuple(row._replace(hf={renamed(name): shape for name, shape in row.hf.items()}) for row in rows)


def _join(row: WeightRow, joined: Mapping[str, str], qkv: Kind) -> WeightRow:
    first, *_ = row.hf
    *above, name, end = first.split(".")
    for tensor, part in joined.items():
        if name == part and row.kind in (Kind.QKV, Kind.COLUMN_PARALLEL):
            kind = qkv if row.kind is Kind.QKV else Kind.JOINED_GATE_UP
            shape = (sum(shape[0] for shape in row.hf.values()), *row.hf[first][1:])
            return row._replace(kind=kind, hf={".".join((*above, tensor, end)): shape})
    return row


def _biases(rows: Sequence[WeightRow], model: ModelConfig, traits: Traits) -> Iterator[WeightRow]:
    """Yield the biases beside weights; TP cuts a bias if it cuts the rows of the weight."""
    is_all, layer = traits.add_bias_linear, "decoder.layers.*."
    biased = {
        f"{layer}self_attention.linear_qkv": is_all or traits.add_qkv_bias,
        f"{layer}self_attention.linear_proj": is_all or model.add_proj_bias,
        f"{layer}mlp.linear_fc1": is_all or model.add_mlp_bias,
        f"{layer}mlp.linear_fc2": is_all or model.add_mlp_bias,
    }
    for row in rows:
        name = row.name.removesuffix(".weight")
        if biased.get(name, row.part == "norm" and traits.normalization == "LayerNorm"):
            kind = Kind.REPLICATED if row.kind is Kind.ROW_PARALLEL else row.kind
            hf = {f"{tensor.removesuffix('weight')}bias": shape[:1] for tensor, shape in row.hf.items()}
            yield row._replace(name=f"{name}.bias", kind=kind, hf=hf)


class _LayerRow(NamedTuple):
    """Factory of rows of some layers; tensor and parameter names are relative to the layer."""

    layers: Sequence[int]
    model: ModelConfig
    traits: Traits

    def __call__(
        self, name: str, part: Part, kind: Kind, hf: Mapping[str, tuple[int, ...]], **own: Any
    ) -> WeightRow:
        named = {f"model.layers.*.{tensor}": shape for tensor, shape in hf.items()}
        return WeightRow(f"decoder.layers.*.{name}", part, kind, named, layers=self.layers, **own)

    def norm(self, name: str, theirs: str, size: int) -> WeightRow:
        return self(f"{name}.weight", "norm", Kind.REPLICATED, {f"{theirs}.weight": (size,)})


def _layer_rows(model: ModelConfig, traits: Traits) -> list[WeightRow]:
    """Parameters of a layer in the order of its computation; those that traits add come last."""
    hidden, head = model.hidden_size, model.kv_channels
    query, key = model.num_attention_heads * head, model.num_query_groups * head
    qkv = {"q": query, "k": key, "v": key}
    row = _LayerRow(range(model.num_layers), model, traits)
    norm = row.norm
    norms = _NORMS[traits.norm_placement]
    of_attention, of_mlp = ([norm(*names, hidden) for names in each] for each in norms)
    matrices = {f"self_attn.{name}_proj.weight": (count, hidden) for name, count in qkv.items()}
    merged = row("self_attention.linear_qkv.weight", "attention", Kind.QKV, matrices)
    output = {"self_attn.o_proj.weight": (hidden, model.num_attention_heads * model.value_channels)}
    with_experts = expert_layers(model)
    dense = [n for n in row.layers if n not in with_experts] if with_experts else row.layers
    rows = [
        *of_attention,
        *(_latents(row) if model.is_latent else [merged]),
        row("self_attention.linear_proj.weight", "attention", Kind.ROW_PARALLEL, output),
        *of_mlp,
        *(_mlp(row._replace(layers=dense), "mlp", "mlp", "mlp", model.ffn_hidden_size) if dense else ()),
        *(_experts(row._replace(layers=with_experts)) if with_experts else ()),
    ]
    is_each = traits.qk_norm_of == "head"
    for n in ("q", "k") if traits.qk_layernorm else ():
        kind = Kind.REPLICATED if is_each else Kind.COLUMN_PARALLEL
        weight = {f"self_attn.{n}_norm.weight": (head if is_each else qkv[n],)}
        rows.append(row(f"self_attention.{n}_layernorm.weight", "norm", kind, weight))
    return rows


def _latents(row: _LayerRow) -> list[WeightRow]:
    """Weights of latent attention's queries, keys and values. Every TP rank computes whole latents."""
    model = row.model
    rank, rope, heads = model.kv_lora_rank, model.qk_pos_emb_head_dim, model.num_attention_heads
    assert rank and rope and model.qk_head_dim

    def matrix(ours: str, theirs: str, kind: Kind, *shape: int) -> WeightRow:
        name = f"self_attention.linear_{ours}_proj.weight"
        return row(name, "attention", kind, {f"self_attn.{theirs}.weight": shape})

    whole, cut, hidden = Kind.REPLICATED, Kind.COLUMN_PARALLEL, model.hidden_size
    query, key_value = (heads * (model.qk_head_dim + more) for more in (rope, model.value_channels))
    of_queries = [matrix("q", "q_proj", cut, query, hidden)]
    if model.q_lora_rank is not None:
        of_queries = [
            matrix("q_down", "q_a_proj", whole, model.q_lora_rank, hidden),
            row.norm("self_attention.q_layernorm", "self_attn.q_a_layernorm", model.q_lora_rank),
            matrix("q_up", "q_b_proj", cut, query, model.q_lora_rank),
        ]
    return [
        *of_queries,
        matrix("kv_down", "kv_a_proj_with_mqa", whole, rank + rope, hidden),
        row.norm("self_attention.kv_layernorm", "self_attn.kv_a_layernorm", rank),
        matrix("kv_up", "kv_b_proj", cut, key_value, rank),
    ]


def _mlp(row: _LayerRow, name: str, theirs: str, part: Part, width: int, **own: Any) -> list[WeightRow]:
    given = ("gate", "up") if row.traits.gated_linear_unit else ("up",)
    first = {f"{theirs}.{each}_proj.weight": (width, row.model.hidden_size) for each in given}
    second = {f"{theirs}.down_proj.weight": (row.model.hidden_size, width)}
    return [
        row(f"{name}.linear_fc1.weight", part, Kind.COLUMN_PARALLEL, first, **own),
        row(f"{name}.linear_fc2.weight", part, Kind.ROW_PARALLEL, second, **own),
    ]


def _experts(row: _LayerRow) -> list[WeightRow]:
    """Parameters of a layer with experts, with Qwen's names; an EP rank has E / EP experts, from 0 on."""
    model = row.model
    hidden, number, shared = model.hidden_size, model.num_experts, model.moe_shared_expert_intermediate_size
    assert number is not None
    own = {"num_experts": number, "active": model.moe_router_topk / number}
    rows = [
        row("mlp.router.weight", "router", Kind.REPLICATED, {"mlp.gate.weight": (number, hidden)}),
        *_mlp(row, "mlp.experts.local_experts.#", "mlp.experts.#", "expert", model.expert_width, **own),
    ]
    if model.moe_router_enable_expert_bias:
        bias = {"mlp.gate.e_score_correction_bias": (number,)}
        rows.insert(1, row("mlp.router.expert_bias", "router", Kind.REPLICATED, bias, is_buffer=True))
    if shared:
        rows += _mlp(row, "mlp.shared_experts", "mlp.shared_expert", "shared expert", shared)
        if model.moe_shared_expert_gate:
            gate = {"mlp.shared_expert_gate.weight": (1, hidden)}
            rows.append(row("mlp.shared_experts.gate_weight", "router", Kind.REPLICATED, gate))
    return rows
