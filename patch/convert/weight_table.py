"""The weight table of a family (patch/families) with a mapping for each row.

Building a table takes microseconds, so it is not cached.
"""

from __future__ import annotations

from typing import NamedTuple

from patch.config.schema import ModelConfig
from patch.convert.mappings import WeightMapping
from patch.families import Kind, WeightRow, expert_layers, stored_rows
from patch.families.adapters import AdapterConfig, adapter_rows
from patch.families.weights import OTHER_NAMES, TIED_OUTPUT, HFTensor

Table = dict[str, WeightMapping]
"""Parameter name -> mapping; `*` is the layer's number in the whole model, `#` the expert's number."""


class CheckpointLocation(NamedTuple):
    """The place of one layer's and one expert's parameter in a torch_dist checkpoint."""

    key: str
    numbers: tuple[int, ...]
    """Its index on each leading axis of the stored tensor."""
    sizes: tuple[int, ...]
    """The sizes of these axes."""


def checkpoint_location(name: str, layer: int, expert: int, model: ModelConfig) -> CheckpointLocation:
    """Return where upstream stores a parameter; `name` is the table's.

    Layers are stacked on a leading axis if all are alike, and experts always (transformer_block.py:830,
    moe/experts.py:935). A norm before experts or latent attention is not fused with a linear layer.
    """
    has_experts = layer in expert_layers(model)
    fused = {
        plain: other
        for other, plain in OTHER_NAMES.items()
        if "layers" in other
        and not (has_experts and "pre_mlp" in plain)
        and not (model.is_latent and "input" in plain)
    }
    key, axes = fused.get(name, name), []
    if "*" in key:
        is_stacked = len(expert_layers(model)) in (0, model.num_layers)
        key = key.replace("layers.*.", "layers." if is_stacked else f"layers.{layer}.")
        axes += [(layer, model.num_layers)] if is_stacked else []
    if "#" in key:
        key = key.replace("local_experts.#.", "experts.")
        axes.append((expert, model.num_experts or 1))
    return CheckpointLocation(key, tuple(index for index, _ in axes), tuple(size for _, size in axes))


def parameter_table(model: ModelConfig, padded_vocab_size: int) -> Table:
    """Return every parameter and stored buffer of a model, in Hugging Face's order."""
    return {row.name: _mapping(row, model, padded_vocab_size) for row in stored_rows(model)}


def adapter_table(model: ModelConfig, adapter: AdapterConfig) -> Table:
    """Return every parameter of a model's adapters, by PEFT's names without `base_model.model.`."""
    return {row.name: _mapping(row, model, 0) for row in adapter_rows(model, adapter)}


def weights_table(model: ModelConfig, padded_vocab_size: int | None = None) -> Table:
    """Return the table of the stored weights, without a tied output layer, which is not stored.

    Args:
        padded_vocab_size: rows of the vocabulary with padding, or None for no padding.
    """
    table = parameter_table(model, padded_vocab_size or model.vocab_size)
    if not model.untie_embeddings_and_output_weights:
        del table[TIED_OUTPUT]
    return table


def _mapping(row: WeightRow, model: ModelConfig, padded_vocab_size: int) -> WeightMapping:
    hf = tuple(HFTensor(name, shape) for name, shape in row.hf.items())
    groups = model.num_query_groups
    joined = {Kind.JOINED_QKV: (model.num_attention_heads // groups, 1, 1), Kind.JOINED_GATE_UP: (1, 1)}
    return WeightMapping(
        row.kind, hf, row.layers, row.num_experts, row.is_buffer,
        padded_rows=padded_vocab_size if row.kind is Kind.VOCAB_PARALLEL else None,
        num_groups=groups if row.kind in (Kind.QKV, Kind.JOINED_QKV) else None,
        joined=joined.get(row.kind, ()),
    )  # fmt: skip
