"""The parameters of this rank's pipeline stages, each with its mapping."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from patch.convert.mappings import Mapping
from patch.convert.weight_table import Table, table_name

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


class Weight(NamedTuple):
    """A parameter's name in the table, its local part, and its mapping with the layer filled in."""

    name: str
    parameter: torch.Tensor
    mapping: Mapping


def stage_weights(stages: Sequence[GPTModel], table: Table) -> Iterator[Weight]:
    """Each parameter of a rank's stages with its mapping.

    The number in a parameter's name counts within the stage; the layer itself knows its number (from 1)
    in the whole model.
    """
    for stage in stages:
        for name, parameter in stage.named_parameters():
            layer = 0
            if match := _LAYER.match(name):
                layer = stage.decoder.layers[int(match[1])].layer_number - 1
                name = table_name(_LAYER.sub("decoder.layers.*.", name))
            assert name in table, f"the table of this family has no parameter {name}"
            yield Weight(name, parameter.detach(), table[name].at_layer(layer))
