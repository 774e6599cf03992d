"""AC=sel and AC=full, uniform and block: what backward holds and computes again, and that no bit changes."""

from typing import Any

import pytest
import torch
from distributed_runner import new_job, run_distributed
from small_runs import small_run
from torch.utils.flop_counter import FlopCounterMode
from training_runs import bits_of_steps, build_seeded_run, saved_for_backward

from patch.config.schema import RunConfig
from patch.plan import activation_bytes

SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {"recompute_granularity": "full"},
}
BLOCK = {"block": {"recompute_granularity": "full", "recompute_method": "block"}}
"""The first layer of each stage."""
FAMILIES = {"add_qkv_bias": True, "qk_layernorm": True, "window_size": "7,0"}
ALONE: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16, one sample": {"precision": "bf16", "micro_batch_size": 1},
    "families": FAMILIES,
    "fp8": {"precision": "fp8"},
    "aligned eager": {"precision_align": "eager"},
    "aligned sdpa, one sample, bf16": {
        "precision_align": "sdpa", "micro_batch_size": 1, "precision": "bf16",
    },
}  # fmt: skip
TOGETHER: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "sp": {"tp": 2, "sequence_parallel": True, "precision": "bf16"},
    "sp, fp8": {"tp": 2, "sequence_parallel": True, "precision": "fp8", "fp8_recipe": "rowwise", **FAMILIES},
    "sp, aligned": {"tp": 2, "sequence_parallel": True, "precision_align": "eager", **FAMILIES},
    "pp": {"pp": 2},
    "vpp": {"pp": 2, "stage": 1},
    "dp": {"dp": 2, "data_parallel_sharding": "gradients"},
}
MEASURED: dict[str, dict[str, Any]] = {
    "fp32": {"max_padding_length": 64, "seq_length": 64},
    "bf16, one sample": {
        "precision": "bf16", "micro_batch_size": 1, "global_batch_size": 1, "num_attention_heads": 8,
    },
    "fp8, one sample": {
        "precision": "fp8", "micro_batch_size": 1, "global_batch_size": 1, "num_attention_heads": 8,
    },
}  # fmt: skip


def run_of(changes: dict[str, Any], setting: str) -> RunConfig:
    return small_run(**{"train_iters": 2, "num_layers": 2, **changes, **(SETTINGS | BLOCK)[setting]})


def bits(config: RunConfig) -> list[Any]:
    found = bits_of_steps(build_seeded_run(config))
    new_job()
    return found


def measure(changes: dict[str, Any]) -> dict[str, Any]:
    """By setting: bytes that a layer's backward waits for, and FLOPs of a layer's matrix products."""
    found = {}
    for setting in SETTINGS:
        per_depth = []
        for layers in (1, 2):
            config = run_of({**changes, "num_layers": layers}, setting)
            run = build_seeded_run(config)
            (model,) = run.stages
            batch = run.train_reader.step(0)[0]
            weights = {p.untyped_storage()._cdata for p in model.parameters()}
            saved: dict[int, torch.UntypedStorage] = {}
            with FlopCounterMode(display=False) as flops:
                with saved_for_backward(saved):
                    loss = model(batch.tokens, None, None, labels=batch.labels).sum()
                held = sum(s.nbytes() for key, s in saved.items() if key not in weights)
                run.optimizer.zero_grad(1e-3)
                loss.backward()
            per_depth.append((held, flops.get_total_flops()))
            run.optimizer.finish_grad_sync()
            new_job()
        (held_by_1, flops_of_1), (held_by_2, flops_of_2) = per_depth
        planned = activation_bytes(
            config.model, config.parallel, config.training, length=config.sample_length, cuda=False
        )
        found[setting] = {
            "bytes": held_by_2 - held_by_1,
            "planned": planned[config.training.recompute_granularity],
            "flops": flops_of_2 - flops_of_1,
        }
    return found


def run_alone(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        case: {setting: bits(run_of(changes, setting)) for setting in SETTINGS | BLOCK}
        for case, changes in ALONE.items()
    }
    return found | {"measured": {case: measure(changes) for case, changes in MEASURED.items()}}


def run_together(rank: int, world_size: int) -> dict[str, Any]:
    return {
        case: {setting: bits(run_of(changes, setting)) for setting in ("none", "selective", "block")}
        for case, changes in TOGETHER.items()
    }


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return run_distributed(run_alone, 1)[0]


@pytest.fixture(scope="module")
def together() -> list[dict[str, Any]]:
    return run_distributed(run_together, 2)


@pytest.mark.parametrize("setting", ["selective", "full", "block"])
@pytest.mark.parametrize("case", ALONE)
def test_recomputation_changes_no_bit(alone: dict, case: str, setting: str) -> None:
    assert alone[case][setting] == alone[case]["none"]


@pytest.mark.parametrize("case", TOGETHER)
def test_recomputation_changes_no_bit_in_any_layout(together: list, case: str) -> None:
    for rank in together:
        assert rank[case]["selective"] == rank[case]["block"] == rank[case]["none"]


# torch's counter does not know products of 8-bit factors
@pytest.mark.parametrize("case", [case for case in MEASURED if "fp8" not in case])
def test_selective_saves_much_and_does_no_product_again(alone: dict, case: str) -> None:
    """Recomputing fused attention, as upstream does by default, saved 0.1 % for an attention forward."""
    measured = alone["measured"][case]
    share = 0.55 if "bf16" in case else 0.86  # norms are recomputed in half precision
    assert measured["selective"]["bytes"] < share * measured["none"]["bytes"]
    assert measured["selective"]["flops"] == measured["none"]["flops"]
    assert measured["full"]["bytes"] < 0.25 * measured["selective"]["bytes"]
    assert measured["full"]["flops"] > 1.25 * measured["none"]["flops"]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("case", MEASURED)
def test_the_plan_says_what_a_layer_holds(alone: dict, case: str, setting: str) -> None:
    measured = alone["measured"][case][setting]
    assert measured["planned"] == pytest.approx(measured["bytes"], rel=0.005)
