"""CUDA graphs of the layers against the same run without them, to the bit."""

import hashlib
import warnings
from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state
from small_runs import small_run
from torch.profiler import ProfilerActivity, profile
from training_runs import build_seeded_run

from patch.device import DeviceContext
from patch.training.evaluation import evaluate
from patch.training.run_state import Progress, resume, save
from patch.training.setup import Run, use_graphs
from patch.training.step import train_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LAYERS, MICRO_BATCHES = 4, 2


def build(job: DeviceContext, stage: str, *, graphs: bool, seed: int = 1) -> Run:
    return build_seeded_run(
        small_run(
            precision="bf16", train_iters=6, data_parallel_sharding=stage, deterministic_mode=True, seed=seed,
            cuda_graph_impl="local" if graphs else "none", gradient_accumulation_fusion=False,
        ),
        None,
        job,
    )  # fmt: skip


def train(run: Run, first: int, last: int) -> list:
    """Loss and norm of each step, with an evaluation after the first; the weights' digest."""
    found = []
    for iteration in range(first, last):
        step = train_step(run, iteration)
        found.append((step.loss, step.grad_norm))
        if iteration == first:
            found.append((evaluate(run)["valid_loss"],))
    run.optimizer.finish_param_sync()
    digest = hashlib.sha256()
    for parameter in run.stages[0].parameters():
        digest.update(parameter.detach().contiguous().view(torch.uint8).cpu().numpy())
    return [*found, digest.hexdigest()]


@pytest.mark.parametrize("stage", ["none", "optimizer", "gradients"])
def test_graphs_change_no_bit(job: DeviceContext, deterministic: None, tmp_path: Path, stage: str) -> None:
    plain = build(job, stage, graphs=False)
    expected = train(plain, 0, 3), train(plain, 3, 5)
    parallel_state.destroy_model_parallel()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = build(job, stage, graphs=True)
        use_graphs(run)
        assert train(run, 0, 3) == expected[0]
        save(tmp_path, Progress(3, 3), run.stages, run.optimizer, "")
        parallel_state.destroy_model_parallel()
        run = build(job, stage, graphs=True, seed=77)
        resume(tmp_path, Progress(3, 3), run.stages, run.optimizer, 77)
        use_graphs(run)
        assert train(run, 3, 5) == expected[1]
    # Hooks of gradients would run on the capture's stream (patch/model/cuda_graphs.py).
    assert not [found for found in caught if "AccumulateGrad" in str(found.message)]


def test_a_layer_is_one_launch_each_way(job: DeviceContext) -> None:
    counts = {}
    for graphs in (False, True):
        run = build(job, "none", graphs=graphs)
        if graphs:
            use_graphs(run)
        train_step(run, 0)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            train_step(run, 1)
            torch.cuda.synchronize()
        names = [event.name for event in profiled.events()]
        counts[graphs] = names.count("cudaGraphLaunch"), sum("LaunchKernel" in name for name in names)
        parallel_state.destroy_model_parallel()
    assert (counts[False][0], counts[True][0]) == (0, 2 * LAYERS * MICRO_BATCHES)
    assert counts[True][1] < counts[False][1] / 2, counts
