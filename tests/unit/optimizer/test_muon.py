"""Muon: the steps of torch.optim.Muon and AdamW, at every stage and place, and parts of fused matrices.

Layouts of a run and its checkpoints: training/test_any_layout.py.
"""

import math
from itertools import product
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from distributed_runner import run_distributed
from optimizer_runs import (
    LR,
    ZERO_STAGES,
    OddModel,
    build_optimizer,
    make_steps,
    on_host,
    take_step,
    weights_of,
)
from small_runs import small_run
from training_runs import build_seeded_run

from patch.config.choices import ZeroStage
from patch.convert.live_weights import iter_hf_weights
from patch.plan.memory import bytes_per_rank
from patch.training.step import train_step

NUM_STEPS, BOUND = 3, 1e-2
"""Bound as a share of the length of all steps: torch's own lerp is fused, and bf16 rounds what follows."""
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "original": ({"muon_scale_mode": "shape_scaling"}, {"nesterov": False}),
    "Nesterov": ({"muon_scale_mode": "shape_scaling", "muon_use_nesterov": True}, {"nesterov": True}),
    "as AdamW": (
        {"muon_extra_scale_factor": 0.2, "muon_num_ns_steps": 3, "muon_momentum": 0.8},
        {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3, "momentum": 0.8},
    ),
    "unit_rms_norm": ({"muon_scale_mode": "unit_rms_norm"}, {"nesterov": False}),
}
"""Our configuration, and torch's."""


def expected_weights(name: str) -> dict[str, np.ndarray]:
    model = OddModel()
    matrices, others = ([p for p in model.parameters() if (p.ndim == 2) is kind] for kind in (True, False))
    rates = [min(1, math.sqrt(len(p) / p.shape[1])) if name == "unit_rms_norm" else 1 for p in matrices]
    parts = [
        {"params": [matrix], "lr": LR * rate, "weight_decay": 0.1 / rate}
        for matrix, rate in zip(matrices, rates, strict=True)
    ]
    optimizers = (
        torch.optim.Muon(parts, **CASES[name][1]),
        torch.optim.AdamW(others, lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0),
    )
    for step in make_steps(NUM_STEPS, 2, 1):
        model.zero_grad()
        sum(model(batch) for batches in step for batch in batches).backward()
        for optimizer in optimizers:
            optimizer.step()
    return weights_of(model)


def found_weights(rank: int, world_size: int) -> dict[Any, dict[str, np.ndarray]]:
    found = {}
    for name, (changes, _) in CASES.items():
        stages = ZERO_STAGES if name == "original" else (ZeroStage.OPTIMIZER,)
        for stage, offload in product(stages, (None, on_host(0.6))):
            model = OddModel()
            how = {"optimizer": "muon", "clip_grad": 0.0, "offload": offload, **changes}
            optimizer = build_optimizer(model, stage, **how)
            for step in make_steps(NUM_STEPS, 2, 1):
                take_step(model, optimizer, step[rank])
            with optimizer.full_weights():
                found[name, stage, offload is None] = weights_of(model)
            assert (optimizer.report().host_bytes > 0) is (offload is not None)
    return found


def test_steps_are_those_of_torch_at_every_stage_and_place() -> None:
    ranks, initial = run_distributed(found_weights, 2), weights_of(OddModel())
    for name in CASES:
        expected = expected_weights(name)
        others = [each[key] for each in ranks for key in each if key[0] == name]
        for weight, values in expected.items():
            error = np.linalg.norm(others[0][weight] - values) / np.linalg.norm(values - initial[weight])
            assert error < BOUND, (name, weight, error)
            assert all(np.array_equal(other[weight], others[0][weight]) for other in others), (name, weight)


def changes_of_a_step(rank: int, world_size: int) -> dict[str, np.ndarray]:
    changes = {"optimizer": "muon", "muon_num_ns_steps": 15, "weight_decay": 0.0, "lr": 0.1}
    config = small_run(tp=world_size, sequence_parallel=True, **changes)
    run, found = build_seeded_run(config), list[dict[str, torch.Tensor]]()
    assert run.optimizer.report().device_bytes == bytes_per_rank(config).optimizer
    for iteration in range(2):
        with run.optimizer.full_weights():
            found.append(dict(iter_hf_weights(run.stages, config.model, run.groups)))
        train_step(run, iteration)
    with run.optimizer.full_weights():
        found.append(dict(iter_hf_weights(run.stages, config.model, run.groups)))
    return {name: (weight - found[1][name]).double().numpy() for name, weight in found[2].items()}


def test_each_matrix_of_hugging_face_is_orthogonal_by_itself_over_tp() -> None:
    first, _ = run_distributed(changes_of_a_step, 2)
    matrices = {name: change for name, change in first.items() if ".layers." in name and change.ndim == 2}
    assert len(matrices) == 4 * 7
    for name, change in matrices.items():
        sizes = np.linalg.svd(change, compute_uv=False) / math.sqrt(max(change.shape))
        assert sizes.min() > 0.55 * sizes.max(), name  # the iteration ends between 0.68 and 1.14
        assert 0.056 < sizes.max() < 0.058, name  # the factor of its shape, and a rate of 0.05


def most_at_once(rank: int, world_size: int) -> int:
    run, alive, most = build_seeded_run(small_run(dp=world_size, optimizer="muon")), WeakSet(), [0]
    muon = run.optimizer._muon
    orthogonalize = muon._orthogonalize

    def count(parameter: torch.nn.Parameter, whole: torch.Tensor) -> None:
        alive.add(whole.untyped_storage())
        most.append(len(alive))
        orthogonalize(parameter, whole)

    muon._orthogonalize = count  # type: ignore[method-assign]
    train_step(run, 0)
    assert len(most) > 8
    return max(most)


def test_a_rank_never_has_all_whole_matrices() -> None:
    assert run_distributed(most_at_once, 1) == [1]
    assert run_distributed(most_at_once, 2) == [1, 1]
