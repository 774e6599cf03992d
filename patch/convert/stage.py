"""The parameters of this rank's pipeline stage, each with its mapping."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from patch.convert.mappings import Mapping
from patch.convert.table import Table, table_name

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


class Weight(NamedTuple):
    """A parameter's name in the table, its local part, and its mapping with the layer filled in."""

    name: str
    parameter: torch.Tensor
    mapping: Mapping


def stage_weights(model: GPTModel, table: Table) -> Iterator[Weight]:
    """Each parameter of one stage with its mapping.

    The number in a parameter's name counts within the stage; the layer itself knows its number (from 1)
    in the whole model.
    """
    for name, parameter in model.named_parameters():
        layer = 0
        if match := _LAYER.match(name):
            layer = model.decoder.layers[int(match[1])].layer_number - 1
            name = table_name(_LAYER.sub("decoder.layers.*.", name))
        assert name in table, f"the table of this family has no parameter {name}"
        yield Weight(name, parameter.detach(), table[name].at_layer(layer))
