"""`--fp8-param-gather` changes what travels and what is kept, and no bit of losses, weights and states.

The norm may differ in its last bits: buckets differ, and with them the order of its sums.

The oracle is the same run without the flag, whose layers round gathered bf16 weights themselves. More:
test_covered_layouts.py, against one process.
"""

from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from distributed_runner import new_job, run_distributed
from small_runs import small_run
from training_runs import build_seeded_run, digest_of, resume_seeded_run, train_run

from patch.config.schema import RunConfig
from patch.errors import TrainingError
from patch.training.run_state import Progress, save
from patch.training.setup import Run, checkpoint_root
from patch.training.step import train_step

pytestmark = pytest.mark.long

STEPS = 2
CUT = 3000
"""Elements of a bucket: fewer than most weights have."""


def run_of(**changes: Any) -> RunConfig:
    settings = {"precision": "fp8", "train_iters": STEPS, "reduce_bucket_size": CUT, "global_batch_size": 8}
    return small_run(**settings | changes)


TWO = {
    "cut": {"dp": 2, "data_parallel_sharding": "gradients"},
    "no cache": {
        "dp": 2, "data_parallel_sharding": "optimizer", "disable_parameter_transpose_cache": True,
        "first_last_layers_bf16": True, "reduce_bucket_size": 10**9,
    },
    "nothing shared": {"dp": 2, "data_parallel_sharding": "none"},
}  # fmt: skip
FOUR = {
    "dp=4": {"dp": 4, "data_parallel_sharding": "optimizer"},
    "tied vpp": {
        "dp": 2, "pp": 2, "stage": 1, "untie_embeddings_and_output_weights": False,
        "data_parallel_sharding": "gradients",
    },
    "instances": {
        "dp": 4, "num_distributed_optimizer_instances": 2, "data_parallel_sharding": "optimizer",
        "cpu_offloading": True,
    },
}  # fmt: skip


def weights_of(run: Run) -> str:
    """A digest of all weights in bf16."""
    with run.optimizer.full_weights():
        return digest_of(p for stage in run.stages for p in stage.parameters())


def trained(config: RunConfig) -> tuple[list, str, int, set[torch.dtype]]:
    """Losses and norms, the weights, bytes of weights, and the types of the parameters between steps."""
    run = build_seeded_run(config)
    results = [(result.loss, result.grad_norm) for result in train_run(run)]
    types = {p.dtype for stage in run.stages for p in stage.parameters()}
    found = results, weights_of(run), run.optimizer.param_buffer.num_bytes, types
    new_job()
    return found


def run_pairs(rank: int, world_size: int, cases: dict[str, dict]) -> dict[str, list]:
    """Body: each case with and without the flag."""
    return {
        name: [trained(run_of(**changes, fp8_param_gather=is_used)) for is_used in (True, False)]
        for name, changes in cases.items()
    }


@pytest.fixture(scope="module")
def results() -> dict[str, list]:
    found: dict[str, list] = {}
    for world_size, cases in ((2, TWO), (4, FOUR)):
        ranks = run_distributed(run_pairs, world_size, cases, timeout_s=240)
        found |= {name: [rank[name] for rank in ranks] for name in cases}
    return found


@pytest.mark.parametrize("name", [*TWO, *FOUR])
def test_training_has_the_bits_of_a_run_that_gathers_bf16(results: dict, name: str) -> None:
    for (gathered, weights, *_), (expected, expected_weights, *_) in results[name]:
        assert [loss for loss, _ in gathered] == [loss for loss, _ in expected]
        # Buckets differ, and so does the order in which their float64 sums are added.
        assert [norm for _, norm in gathered] == pytest.approx([norm for _, norm in expected], rel=1e-12)
        assert weights == expected_weights


def test_layers_keep_one_byte_a_weight_where_replicas_share_states(results: dict) -> None:
    for name, ranks in results.items():
        for (*_, types), (*_, others) in ranks:
            assert others == {torch.bfloat16}, name
            assert types == (others if name == "nothing shared" else {torch.bfloat16, torch.float8_e4m3fn})


def test_a_rank_has_one_byte_a_weight_and_its_shards_in_two(results: dict) -> None:
    model = run_of().model
    heads = model.hidden_size * (model.num_attention_heads + 2 * model.num_query_groups) * model.kv_channels
    matrices = model.num_layers * (
        heads + model.hidden_size**2 + 3 * model.hidden_size * model.ffn_hidden_size
    )
    for (_, _, found, _), (_, _, expected, _) in results["dp=4"]:
        assert expected - found == pytest.approx(matrices * (2 - 1 - 2 / 4), rel=0.05)  # buckets are padded


def steps_and_save(config: RunConfig, num_steps: int) -> None:
    run = resume_seeded_run(config)
    for iteration in range(run.start_iteration, num_steps):
        train_step(run, iteration)
    save(checkpoint_root(config), Progress(num_steps, 0), run.stages, run.optimizer, "")
    is_used = config.training.fp8_param_gather
    with pytest.raises(TrainingError, match="full_weights") if is_used else nullcontext():
        run.stages[0].state_dict()
    new_job()


def run_resumes(rank: int, world_size: int, folder: Path) -> None:
    """Body: two steps and two more, each with and without the flag."""
    for first, second in product((True, False), repeat=2):
        places = {"output_path": str(folder / f"{first}-{second}"), "train_iters": 4, **TWO["cut"]}
        steps_and_save(run_of(**places, fp8_param_gather=first), 2)
        steps_and_save(run_of(**places, fp8_param_gather=second), 4)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Weights and optimizer states of a checkpoint, as plain DCP reads them."""
    found = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(meta.size, dtype=meta.properties.dtype)
        for key, meta in found.items()
        if hasattr(meta, "size")
    }
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors


def test_a_run_goes_on_with_the_flag_and_without_it(tmp_path: Path) -> None:
    run_distributed(run_resumes, 2, tmp_path)
    expected = stored(tmp_path / "False-False" / "checkpoint" / "iter_0000004")
    assert {tensor.dtype for tensor in expected.values()} >= {torch.bfloat16, torch.int16, torch.float32}
    for name in ("True-True", "True-False", "False-True"):
        found = stored(tmp_path / name / "checkpoint" / "iter_0000004")
        assert found.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[key]) for key, tensor in found.items())
