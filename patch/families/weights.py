"""The weight table as data: which Hugging Face tensors make up a parameter, and how TP cuts it.

`patch/convert` copies by these rows, `patch/plan` counts by them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum, auto
from typing import NamedTuple

EMBEDDING_PARAMETER = "embedding.word_embeddings.weight"
TIED_OUTPUT = "output_layer.weight"
"""With tied embeddings this parameter (last stage, PP > 1) is a copy of the embedding."""


class Kind(Enum):
    """How a parameter is laid out, and how tensor parallelism (TP) cuts it."""

    REPLICATED = auto()
    """One tensor, whole on every TP rank: a norm."""
    ROW_PARALLEL = auto()
    """One tensor, its columns cut over TP: megatron-core's RowParallelLinear."""
    VOCABULARY = auto()
    """One tensor, its rows padded to the padded vocabulary and cut over TP."""
    GATE_UP = auto()
    """Two tensors, gate and up; a TP rank holds its rows of the first, then its rows of the second."""
    QKV = auto()
    """Three tensors, queries, keys and values; for each key/value group its queries, its key, its value."""


class WeightRow(NamedTuple):
    """One parameter of the model; for a parameter of the layers `*` stands for the layer's number."""

    name: str
    """megatron-core's, counted over the whole model."""
    kind: Kind
    hf: Mapping[str, tuple[int, ...]]
    """The names of the Hugging Face tensors and their shapes, in the order that `kind` says."""

    @property
    def is_per_layer(self) -> bool:
        """Whether every layer has this parameter."""
        return "*" in self.name

    @property
    def is_matrix(self) -> bool:
        """Whether it is multiplied with activations: neither a norm nor a bias."""
        return all(len(shape) > 1 for shape in self.hf.values())

    @property
    def num_elements(self) -> int:
        """Elements of the whole parameter, in one layer, without vocabulary padding."""
        return sum(math.prod(shape) for shape in self.hf.values())
