"""FLOPs against torch's counter: GQA, SwiGLU, windows, packing, recomputation; pairs against masks."""

from typing import Any

import pytest
import torch
from distributed_runner import new_job, run_distributed
from small_runs import small_run
from torch.utils.flop_counter import FlopCounterMode
from training_runs import CPU, build_seeded_run, build_stages

from patch.config import RunConfig
from patch.model import PackedSequences, initialize_weights
from patch.plan.flops import attended_pairs, flops_per_step, mean_pairs
from patch.plan.timing.muon_time import orthogonalization_flops
from patch.training.step import train_step

BORDERS = [0, 10, 32, 37, 64]
"""Of the sequences of two rows of 32 tokens."""
COUNTED: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {"recompute_granularity": "full", "recompute_num_layers": 2},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3},
    "window": {"window_size": (6, 0)},
    "biases and head norms": {"add_qkv_bias": True, "qk_layernorm": True, "num_query_groups": 4},
}
PACKED = ("rows", "packed")
MUON: dict[str, dict[str, Any]] = {
    "ZeRO-1": {"dp": 2, "data_parallel_sharding": "optimizer"},
    "ZeRO-0": {"dp": 2, "data_parallel_sharding": "none", "muon_num_ns_steps": 3},
    "TP": {"tp": 2, "sequence_parallel": True},
    "PP": {"pp": 2, "freeze": r"layers.[02]..*mlp"},
    "adapters": {"lora_rank": 3, "dp": 2},
    "experts": {"dp": 2, "num_experts": 4, "expert_model_parallel_size": 2},
}


def run_of(changes: dict[str, Any]) -> RunConfig:
    """With an attention whose scores are whole squares, which the counter sees."""
    return small_run(vocab_size=256, global_batch_size=2, precision_align="eager", **changes)


def run_all(rank: int, world_size: int) -> dict[Any, int]:
    """FLOPs of a forward and backward by torch's counter."""
    found = {}
    for name, changes in COUNTED.items():
        config = run_of(changes)
        _, (model,) = build_stages(config)
        initialize_weights([model], config.model, seed=1)
        tokens = torch.arange(64).view(2, 32)
        for kind in PACKED:
            borders = torch.tensor(BORDERS, dtype=torch.int32) if kind == "packed" else None
            packed = PackedSequences.of(borders, tokens, CPU.device)
            with FlopCounterMode(display=False) as counter:
                model(tokens, None, None, labels=tokens, packed_seq_params=packed).sum().backward()
            found[name, kind] = counter.get_total_flops()
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(tokens, None, None, labels=tokens)
        found[name, "forward"] = counter.get_total_flops()
        new_job()
    return found


def muon_flops(rank: int, world_size: int) -> dict[str, int]:
    """FLOPs by torch's counter of the directions of one step, on this rank."""
    found = {}
    for name, changes in MUON.items():
        run = build_seeded_run(small_run(optimizer="muon", **changes))
        counter = FlopCounterMode(display=False)
        orthogonalize = run.optimizer._muon.orthogonalize

        def counted(scale: float, work: Any = orthogonalize, counter: Any = counter) -> None:
            with counter:
                work(scale)

        run.optimizer._muon.orthogonalize = counted  # type: ignore[method-assign]
        train_step(run, 0)
        found[name] = counter.get_total_flops()
        new_job()
    return found


@pytest.mark.long
def test_flops_of_muon_are_those_of_torchs_counter() -> None:
    """Over both ranks, which divide the matrices of the model as the plan says."""
    ranks = run_distributed(muon_flops, 2)
    for name, changes in MUON.items():
        config = small_run(optimizer="muon", **changes)
        assert sum(each[name] for each in ranks) == pytest.approx(2 * orthogonalization_flops(config)), name


@pytest.fixture(scope="module")
def counted() -> dict[Any, int]:
    return run_distributed(run_all, 1)[0]


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.long
def test_flops_are_those_of_torchs_counter(counted: dict, name: str, kind: str) -> None:
    """Eager attention computes each sequence's whole square, also what the mask hides."""
    lengths = [10, 22, 5, 27] if kind == "packed" else [32, 32]
    flops = flops_per_step(run_of(COUNTED[name]), sum(length**2 for length in lengths))
    assert counted[name, kind] == flops.hardware
    assert (flops.hardware > flops.model) == (name in ("selective", "full", "block"))
    pairs, of_kto = 2 * 32**2, run_of({**COUNTED[name], "objective": "kto"})
    more = flops_per_step(of_kto, pairs).hardware - flops_per_step(run_of(COUNTED[name]), pairs).hardware
    assert more == counted[name, "forward"]


@pytest.mark.parametrize("window", [None, 1, 2, 7, 8, 9])
@pytest.mark.parametrize("lengths", [[8], [1], [3, 1, 8, 12], []])
def test_attended_pairs_are_the_ones_of_the_masks(lengths: list[int], window: int | None) -> None:
    masks = [torch.ones(length, length).tril() for length in lengths]
    visible = masks if window is None else [mask.triu(1 - window) for mask in masks]
    expected = sum(mask.sum().item() for mask in visible)
    assert attended_pairs(lengths, None if window is None else (window - 1, 0)) == expected


@pytest.mark.parametrize(("skipped", "share"), [(None, 1.0), ("2", 0.5), ("1", 0.0)])
def test_pairs_are_the_mean_over_layers_with_and_without_window(skipped: str | None, share: float) -> None:
    model = small_run(window_size=(1, 0), window_attn_skip_freq=skipped).model
    assert mean_pairs([8], model) == share * 15 + (1 - share) * 36
