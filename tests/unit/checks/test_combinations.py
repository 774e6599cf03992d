"""Every combination of values of positions 9 to 17 and their flags is planned, or refused in clear words."""

import dataclasses
import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from patch.checks.layout import fewer_machines_suffice
from patch.checks.rules import RULES
from patch.config import user_message
from patch.config.fields import FIELDS, coerce
from patch.config.schema import RunConfig
from patch.device import MachineFacts
from patch.errors import ConfigError
from patch.plan.describe import describe_plan
from patch.plan.resolve import resolve_activations, resolve_cp_comm_type, resolve_sharding

SECTIONS = ("model", "parallel", "training", "optimizer", "data")
VALUES = yaml.safe_load(Path(__file__).with_name("combinations.yaml").read_text())
RELATED = [
    ("PP", "stages", "AC", "activations", "batch", "GPU"),
    ("TP", "CP", "CP by", "SP", "length", "align", "PR"),
    ("TP", "PP", "CP", "ranks", "batch"),
    ("DO", "overlapped", "sharding", "CP", "PP", "offload", "GPU"),
    ("SFT", "packing", "CP", "length", "FL"),
]
"""Rules relate values within such a group: all its combinations are tried, with the first of other values."""
SAMPLE = 1000
"""Combinations of all values, drawn at random."""
MESSAGE = re.compile(r"(--[a-z0-9-]+)( \([^)]*\))?: got .+, expected .+: .+", re.DOTALL)


def combinations() -> Iterator[dict[str, Any]]:
    first = {key: value for values in VALUES.values() for key, value in values[0].items()}
    for names in RELATED:
        for chosen in itertools.product(*(VALUES[name] for name in names)):
            yield first | {key: value for changes in chosen for key, value in changes.items()}
    chance = random.Random(0)
    for _ in range(SAMPLE):
        chosen = [chance.choice(values) for values in VALUES.values()]
        yield first | {key: value for changes in chosen for key, value in changes.items()}


def value_of(name: str, value: Any) -> Any:
    return coerce(FIELDS[name], value, name) if isinstance(value, str) else value


def changed(config: RunConfig, changes: dict[str, Any]) -> RunConfig:
    """The run with these values, on as many processes as two replicas take."""
    axes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    changes = changes | {"nproc_per_node": 2 * math.prod(changes[axis] for axis in axes)}
    sections = {}
    for name in SECTIONS:
        section = getattr(config, name)
        own = {field.name for field in dataclasses.fields(section)} & changes.keys()
        values = {field: value_of(field, changes[field]) for field in own}
        sections[name] = dataclasses.replace(section, **values)
    return dataclasses.replace(config, **sections)


def plan(config: RunConfig, machine: MachineFacts) -> str:
    """What `--dry-run` says of a run that passes the rules, its automatic choices made."""
    config, _ = resolve_sharding(config, machine)
    config, _ = resolve_cp_comm_type(config)
    config, _ = resolve_activations(config, machine)
    assert len(config.stage_layers) == config.virtual_pipeline_size * (
        config.parallel.pipeline_model_parallel_size
    )
    return describe_plan(config, machine)


@pytest.mark.long
def test_every_combination_is_planned_or_refused_in_clear_words(command) -> None:
    shape = ("--num-layers=4", "--num-attention-heads=12", "--num-query-groups=6", "--ffn-hidden-size=192")
    good = command.parse(*shape, PAD_LEN="48").config
    refused: Counter[str] = Counter()
    num_planned = 0
    for changes in combinations():
        config = changed(good, changes)
        try:
            for rule in (*RULES, fewer_machines_suffice):
                rule(config, command.machine)
        except ConfigError as error:
            found = MESSAGE.fullmatch(user_message(error))
            assert found and found[1] == FIELDS[error.field].flag, user_message(error)
            refused[error.field] += 1
        else:
            assert f"processes   {config.world_size} = " in plan(config, command.machine)
            num_planned += 1
    assert num_planned > 500 and len(refused) > 10
