"""The weight table as data: which Hugging Face tensors make up a parameter, and how TP splits it.

`patch/convert` copies weights by this table, `patch/plan` counts parameters by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum, auto
from typing import NamedTuple

EMBEDDING_PARAMETER = "embedding.word_embeddings.weight"
TIED_OUTPUT = "output_layer.weight"
"""With tied embeddings and PP > 1 this parameter of the last stage is a copy of the embedding."""


class Kind(Enum):
    """How a parameter is laid out, and how tensor parallelism (TP) splits it."""

    REPLICATED = auto()
    """One tensor, complete on every TP rank, such as a norm's weight."""
    ROW_PARALLEL = auto()
    """One tensor whose columns are split over TP, as in megatron-core's RowParallelLinear."""
    VOCAB_PARALLEL = auto()
    """One tensor whose rows are padded to the padded vocabulary and split over TP."""
    GATED_MLP = auto()
    """Two tensors, gate and up. A TP rank stores its rows of gate, then its rows of up."""
    QKV = auto()
    """Three tensors. For each key/value group in turn: the rows of its queries, of its key, of its value."""


class WeightRow(NamedTuple):
    """One parameter of the model. In a layer's parameter, `*` stands for the layer's number."""

    name: str
    """megatron-core's name, with layers numbered over the whole model."""
    kind: Kind
    hf: Mapping[str, tuple[int, ...]]
    """The names and shapes of the Hugging Face tensors, in the order that `kind` states."""

    @property
    def is_per_layer(self) -> bool:
        """Whether every layer has this parameter."""
        return "*" in self.name

    @property
    def is_matrix(self) -> bool:
        """Whether the parameter is a matrix, not the vector of a norm or a bias."""
        return all(len(shape) > 1 for shape in self.hf.values())

    @property
    def num_elements(self) -> int:
        """Elements of the full (unsharded) parameter in one layer, without vocabulary padding."""
        return sum(math.prod(shape) for shape in self.hf.values())
