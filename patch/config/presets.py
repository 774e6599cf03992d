"""The legal values of MODEL_SIZE and the fields they set; the sizes are defined in `patch/families`."""

from __future__ import annotations

from typing import Any

from patch.families import FAMILIES

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
