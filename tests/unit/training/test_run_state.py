"""Checkpoints of a run: weights of any precision start another, resumes, and what upstream's model takes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_runner import new_job, run_distributed
from megatron.core import dist_checkpointing
from small_runs import small_run
from torch.testing._internal.distributed.fake_pg import FakeStore
from training_runs import build_seeded_run, digests, messages_from, save, seeded_batches
from upstream_models import upstream_stage

from patch.distributed.groups import shutdown
from patch.training.run_state import Progress, find_progress, load_weights, resume, state_to_save
from patch.training.step import train_step

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _weights(run) -> dict[str, torch.Tensor]:
    run.optimizer.finish_param_sync()
    return {
        name: parameter.detach().clone()
        for stage in run.stages
        for name, parameter in stage.named_parameters()
    }


def exchange(folder: Path) -> dict[tuple[str, str], tuple[list[str], float]]:
    """(from, to) to: weights that differ from torch's own conversion, and the loss of a step from there."""
    stored = {}
    for theirs in DTYPES:
        run = build_seeded_run(small_run(precision=theirs, initial_loss_scale=1.0))
        train_step(run, 0)
        save(folder / theirs / "checkpoint", Progress(1, 4), run)
        stored[theirs] = _weights(run)
        assert {weight.dtype for weight in stored[theirs].values()} == {DTYPES[theirs]}
        new_job()
    found = {}
    for theirs in DTYPES:
        for ours, dtype in DTYPES.items():
            run = build_seeded_run(small_run(precision=ours, seed=99, initial_loss_scale=1.0))
            load_weights(run, str(folder / theirs))
            run.optimizer.reload_model_params()
            loaded = _weights(run)
            differing = [
                name for name, weight in stored[theirs].items() if not loaded[name].equal(weight.to(dtype))
            ]
            found[theirs, ours] = (differing, train_step(run, 0).loss)
            new_job()
    return found


def layouts_of_orders() -> list[dict[str, int | str]]:
    """What a checkpoint of ranks in each order says of its layout; one of four ranks, which never talk."""
    shutdown()
    found = []
    for order in ("tp-cp-dp-pp", "pp-tp", "tp-cp-pp-dp"):
        dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
        run = build_seeded_run(small_run(tp=2, pp=2, rank_order=order))
        found.append(state_to_save(run, Progress(0, 0))[1]["layout"])
        shutdown()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the runner leaves one
    return found


@pytest.mark.long
def test_checkpoint_knows_the_order_of_its_ranks_for_their_random_generators(alone: dict) -> None:
    found = alone["orders"]
    assert [layout.get("order") for layout in found] == [None, "pp-tp", None]
    assert found[0] == found[2] and found[0]["PP"] == 2


def resume_over_damage(folder: Path) -> tuple[Progress | None, list[str], list]:
    """What a resume takes where the newest checkpoint lost a bit, and whether the next step is the same.

    In 8 bits as before, and in bf16, which goes on from the same state.
    """
    run = build_seeded_run(small_run(precision="fp8"))
    train_step(run, 0)
    save(folder, Progress(1, 4), run)
    saved, expected = digests(run), train_step(run, 1)
    save(folder, Progress(2, 8), run)
    data = folder / "iter_0000002" / "__0_0.distcp"
    contents = bytearray(data.read_bytes())
    contents[len(contents) // 2] ^= 1
    data.write_bytes(contents)
    messages, is_same = messages_from("WARNING", "patch.checkpoint"), []
    found = find_progress(folder)
    for precision in ("fp8", "bf16"):
        new_job()
        run = build_seeded_run(small_run(seed=7, precision=precision))
        resume(run, folder, found)
        assert digests(run) == saved
        again = train_step(run, 1)
        is_same += [again.loss == expected.loss, again.grad_norm == expected.grad_norm]
    return found, messages, is_same


def test_resume_takes_the_older_checkpoint_where_the_newest_has_lost_a_bit(alone: dict) -> None:
    resumed, messages, is_same = alone["damaged"]
    assert resumed == Progress(1, 4) and is_same == [True, True, False, False]
    (message,) = messages
    assert "DAMAGED" in message and "iter_0000002/__0_0.distcp has CRC-32" in message


@pytest.mark.parametrize("ours", DTYPES)
@pytest.mark.parametrize("theirs", DTYPES)
def test_weights_of_any_precision_start_a_run_of_any(alone: dict, theirs: str, ours: str) -> None:
    differing, loss = alone["exchanged"][theirs, ours]
    assert differing == []
    assert loss == pytest.approx(alone["exchanged"][theirs, "fp32"][1], abs=0.05)


@torch.no_grad()
def run_upstream(folder: Path) -> bool:
    run = build_seeded_run(small_run(rope_original_max_position=8192))
    with torch.enable_grad():
        train_step(run, 0)
    save(folder, Progress(1, 8), run)
    (model,) = run.stages
    upstream = upstream_stage(run.config, run.groups, 0)
    loaded = dist_checkpointing.load(upstream.sharded_state_dict(), str(folder / "iter_0000001"))
    upstream.load_state_dict({name: value for name, value in loaded.items() if "." in name}, strict=True)
    weights = dict(model.named_parameters())
    assert weights.keys() == dict(upstream.named_parameters()).keys()
    tokens = seeded_batches(run.config, 0)[0].tokens
    mask = torch.ones(32, 32).triu(1).bool()[None, None]
    expected = upstream(tokens, None, mask)
    torch.testing.assert_close(model(tokens, None, None), expected, rtol=0, atol=1e-5)
    return all(torch.equal(weights[name], weight) for name, weight in upstream.named_parameters())


def test_upstreams_load_gives_its_model_the_bits_of_our_checkpoint_and_it_computes_the_same(
    alone: dict,
) -> None:
    assert alone["upstream"] is True


def run_all(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"exchanged": exchange(folder / "runs"), "damaged": resume_over_damage(folder)}
    new_job()
    found["upstream"] = run_upstream(folder / "upstream")
    return found | {"orders": layouts_of_orders()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process found."""
    return run_distributed(run_all, 1, tmp_path_factory.mktemp("runs"))[0]
