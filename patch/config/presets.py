"""What MODEL_SIZE may say, and which fields it decides; the sizes themselves lie with their families."""

from __future__ import annotations

from typing import Any

from patch.families import FAMILIES

PRESETS: dict[str, dict[str, Any]] = {
    size: dict(fields) for family in FAMILIES.values() for size, fields in family.presets.items()
}
"""MODEL_SIZE to ModelConfig's fields; what a preset leaves out keeps its default."""

MODEL_SIZES: tuple[str, ...] = (*PRESETS, "auto")

REQUIRED_SHAPE: frozenset[str] = frozenset(
    {"num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size"}
)
"""What must be given by hand where neither a preset nor a config.json says it."""

SHAPE_FIELDS: frozenset[str] = frozenset(PRESETS["8B"])
"""Everything a preset decides: what a change of MODEL_SIZE replaces as a whole."""
