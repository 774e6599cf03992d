"""Context parallelism: what a layer keeps for backward, and the plan of it.

Losses and norms: test_covered_layouts.py. Attention alone: tests/unit/model/test_context_parallel.py.
"""

import dataclasses

import pytest
import torch
from distributed_runner import run_distributed
from small_runs import small_run
from training_runs import CPU, saved_for_backward, seeded_batches

from patch import compat
from patch.config.schema import RunConfig
from patch.data.samples import cut_batch
from patch.distributed.groups import initialize
from patch.distributed.zigzag import Zigzag
from patch.model import build_llama_model, initialize_weights
from patch.plan.activations import activation_bytes

WAYS = ("p2p", "a2a")


def run_of(way: str, num_layers: int = 2) -> RunConfig:
    return small_run(cp=2, cp_comm_type=way, num_layers=num_layers)


def held_by_layers(rank: int, world_size: int) -> dict[str, int]:
    """By way: bytes that one layer's backward waits for on this rank."""
    compat.apply(cuda=False)
    groups = initialize(run_of("p2p"), CPU)
    found = {}
    for way in WAYS:
        held = []
        for layers in (1, 2):
            config = run_of(way, layers)
            (stage,) = stages = build_llama_model(config.model, groups, CPU.device, config.execution)
            initialize_weights(stages, config.model, 1)
            batch = cut_batch(seeded_batches(config, 0)[0], Zigzag.of(groups.cp))
            weights = {p.untyped_storage()._cdata for p in stage.parameters()}
            saved: dict[int, torch.UntypedStorage] = {}
            with saved_for_backward(saved):
                stage(batch.tokens, None, None, labels=batch.labels)
            held.append(sum(s.nbytes() for key, s in saved.items() if key not in weights))
        found[way] = held[1] - held[0]
    return found


@pytest.fixture(scope="module")
def held() -> list[dict[str, int]]:
    return run_distributed(held_by_layers, 2)


@pytest.mark.parametrize("way", WAYS)
def test_the_plan_says_what_a_layer_holds(held: list, way: str) -> None:
    config = run_of(way)
    on_one = dataclasses.replace(config.parallel, context_parallel_size=1)
    planned = activation_bytes(config, cuda=False)[None]
    whole = activation_bytes(dataclasses.replace(config, parallel=on_one), cuda=False)[None]
    assert planned < 0.55 * whole
    for of_rank in held:
        assert planned == pytest.approx(of_rank[way], rel=0.005)
