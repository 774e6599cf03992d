"""Legal values whose feature is not built yet: they are refused by name, never ignored.

The rules refuse them, `--help` marks them, and messages do not offer them. Building a feature means to delete
its row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from patch.config.data_spec import parse_data


class NotBuilt(NamedTuple):
    """Values of one field whose feature does not exist yet."""

    field: str
    asks: Callable[[Any], bool]
    """Whether a value of the field needs the feature."""
    values: str
    """Those values in words, for `--help`."""
    feature: str
    instead: str
    """What to give instead, for the message."""


def _names_several(text: str | None) -> bool:
    return text is not None and len(parse_data(text)) > 1


NOT_BUILT: tuple[NotBuilt, ...] = (
    NotBuilt("precision", lambda v: v == "fp8", "fp8", "fp8 training", "bf16, fp16 or fp32"),
    NotBuilt("context_parallel_size", lambda v: v > 1, "above 1", "context parallelism", "1"),
    NotBuilt("cpu_offloading", bool, "true", "activation offload", "AC=sel or full"),
    NotBuilt("train_epochs", bool, "above 0", "a run's length in epochs", "0"),
    NotBuilt("train_data_path", _names_several, "several sets", "a blend of sets", "one set"),
    NotBuilt("valid_data_path", _names_several, "several sets", "several validation sets", "one set"),
    NotBuilt("data_prefetch", lambda v: v != 2, "other than 2", "background reading", "2"),
    NotBuilt(
        "distributed_checkpointing",
        lambda v: not v,
        "false",
        "a checkpoint written by one rank alone",
        "true",
    ),
)


def is_built(field: str, value: Any) -> bool:
    """Whether the feature that this value of a field needs is built."""
    return not any(row.field == field and row.asks(value) for row in NOT_BUILT)


def refused_yet(field: str) -> str:
    """The values of a field that are not supported yet, in words for `--help`; "" if there are none."""
    return "; ".join(row.values for row in NOT_BUILT if row.field == field)
