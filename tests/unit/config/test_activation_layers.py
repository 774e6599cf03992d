"""Which layers of a stage are offloaded, recomputed and kept; and what cannot be."""

import pytest
from small_runs import small_run

from patch.layout.pipeline_stages import stage_activations

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
