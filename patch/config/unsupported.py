"""Legal values whose feature is not built yet: they are refused by name, never ignored.

The rules refuse them, `--help` marks them, and messages do not offer them. Building a feature means to delete
its row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


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


NOT_BUILT: tuple[NotBuilt, ...] = (
    NotBuilt(
        "fp8_recipe",
        lambda v: v in ("mxfp8", "blockwise"),
        "mxfp8, blockwise",
        "a scale for each block of numbers",
        "tensorwise, rowwise or delayed",
    ),
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
