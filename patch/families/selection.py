"""The weights that a run trains, chosen by regular expressions over Hugging Face names."""

from __future__ import annotations

import re
from typing import NamedTuple

from patch.errors import ConfigError, shown
from patch.families import weight_rows
from patch.families.shape import ModelConfig
from patch.families.weights import WeightRow


class Selection(NamedTuple):
    """Two patterns that may match anywhere in a name; both None: all weights train."""

    freeze: str | None = None
    train_only: str | None = None

    def trains(self, name: str) -> bool:
        """Return whether the weight with this Hugging Face name is trained."""
        is_chosen = self.train_only is None or re.search(self.train_only, name) is not None
        return is_chosen and (self.freeze is None or re.search(self.freeze, name) is None)


def trained_rows(model: ModelConfig, selection: Selection) -> tuple[WeightRow, ...]:
    """Return the rows of the weight table, each with only the layers in which it trains."""
    rows = weight_rows(model)
    if selection == Selection():
        return rows
    found = (
        row._replace(
            layers=[layer for layer in row.layers if selection.trains(next(row.tensors(layer)).name)]
        )
        for row in rows
    )
    return tuple(row for row in found if row.layers)


def check_selection(model: ModelConfig, selection: Selection) -> None:
    """Refuse patterns that select nothing, everything, or only a part of a parameter.

    Raises:
        ConfigError: a pattern is malformed or matches no weight; no weight trains; or q, k and v, gate and
            up, or the experts of a layer disagree.
    """
    parameters = [
        [tensor.name for tensor in row.tensors(layer)] for row in weight_rows(model) for layer in row.layers
    ]
    for field, pattern in selection._asdict().items():
        try:
            is_there = pattern is None or any(re.search(pattern, name) for own in parameters for name in own)
        except re.error as error:
            raise ConfigError(
                f"got {shown(pattern)}, expected a regular expression: {error}", field=field
            ) from None
        if not is_there:
            raise ConfigError(
                f"got {shown(pattern)}, which no weight of the model matches, expected a regular expression "
                f"over names such as {parameters[len(parameters) // 2][0]}",
                field=field,
            )
    field = "freeze" if selection.train_only is None else "train_only"
    if selection != Selection() and not trained_rows(model, selection):
        raise ConfigError("no weight is left to train, expected a pattern that leaves some", field=field)
    for own in parameters:
        trained = [name for name in own if selection.trains(name)]
        frozen = [name for name in own if name not in trained]
        if trained and frozen:
            raise ConfigError(
                f"{trained[0]} trains and {frozen[0]} does not, expected both or neither: they are computed "
                "together; change the pattern",
                field=field,
            )
