"""Which layers of a stage are offloaded, recomputed and kept; and what cannot be."""

import re

import pytest
from refusals import refused
from small_runs import small_run

from patch.config.pipeline_stages import stage_activations
from patch.errors import ConfigError
from patch.preflight import validate_run

FULL = {"recompute_granularity": "full"}
BLOCK = FULL | {"recompute_method": "block"}
OFFLOAD = {"cpu_offloading": True}


@pytest.mark.parametrize(
    ("changes", "layers", "expected"),
    [
        ({}, 4, (0, 0, 4)),
        ({"recompute_granularity": "selective"}, 4, (0, 0, 4)),
        (FULL, 4, (0, 4, 0)),
        (BLOCK | {"recompute_num_layers": 3}, 4, (0, 3, 1)),
        (BLOCK | {"recompute_num_layers": 3}, 2, (0, 2, 0)),
        (OFFLOAD, 4, (3, 0, 1)),
        (OFFLOAD, 1, (1, 0, 0)),
        (OFFLOAD, 0, (0, 0, 0)),
        (OFFLOAD | {"cpu_offloading_num_layers": 3}, 4, (3, 0, 1)),
        (OFFLOAD | {"cpu_offloading_num_layers": 3}, 2, (2, 0, 0)),
        (OFFLOAD | BLOCK, 4, (2, 1, 1)),
        (OFFLOAD | BLOCK | {"recompute_num_layers": 3}, 4, (1, 3, 0)),
        (OFFLOAD | BLOCK | {"cpu_offloading_num_layers": 1, "recompute_num_layers": 2}, 4, (1, 2, 1)),
        (OFFLOAD | BLOCK | {"cpu_offloading_num_layers": 2, "recompute_num_layers": 2}, 3, (2, 1, 0)),
    ],
)
def test_layers_are_offloaded_then_recomputed_then_kept(changes, layers, expected):
    assert stage_activations(layers, small_run(**changes).training) == expected


@pytest.mark.parametrize(
    ("positions", "flags", "message"),
    [
        (
            dict(AC="full"),
            ["--recompute-method=block", "--recompute-num-layers=3"],
            "(MP_AC_LAYERS): got 3, expected at most 2: the largest stage has 2 layers",
        ),
        (
            dict(AC="offload"),
            ["--recompute-granularity=full"],
            "--recompute-method: got uniform, expected block, or --recompute-granularity selective or none",
        ),
        (
            dict(AC="offload"),
            ["--cpu-offloading-num-layers=3"],
            "--cpu-offloading-num-layers: got 3, expected at most 2: the largest stage has 2 layers",
        ),
        (
            dict(AC="full"),
            ["--cpu-offloading", "--recompute-method=block", "--cpu-offloading-num-layers=2"],
            "layers: got 2, expected at most 1: the largest stage has 2 layers, and 1 are recomputed (--rec",
        ),
        (
            dict(AC="full"),
            ["--cpu-offloading", "--recompute-method=block", "--recompute-num-layers=2"],
            "(MP_AC_LAYERS): got 2, expected at most 1: the largest stage has 2 layers, and one at least is",
        ),
        (
            dict(AC="full", PP="2"),
            ["--cpu-offloading", "--recompute-method=block"],
            "got 1, expected --recompute-granularity selective or none: the largest stage has 1 layer",
        ),
    ],
)
def test_layers_that_a_stage_does_not_have_are_refused(command, positions, flags, message):
    config = command.parse(*flags, **positions).config
    with refused(ConfigError, re.escape(message)):
        validate_run(config, command.machine)
