"""--profile on a GPU: the trace has kernels and copies."""

import gzip
import json
from pathlib import Path

from megatron.core import parallel_state
from small_runs import small_run
from training_runs import build_seeded_run

from patch.device import DeviceContext
from patch.training.hooks.hook import StepProfile
from patch.training.trainer import Trainer


def test_a_step_with_offloaded_states_has_kernels_and_copies(job: DeviceContext, tmp_path: Path) -> None:
    config = small_run(
        precision="bf16", train_iters=3, save_interval=9, eval_interval=0, output_path=str(tmp_path),
        optimizer_offload_policy="static", optimizer_offload_fraction=0.5,
        optimizer_offload_chunk_size=20000, reduce_bucket_size=30000,
    )  # fmt: skip
    run = build_seeded_run(config, None, job)
    try:
        settle = run.optimizer.finish_param_sync
        hook = StepProfile(tmp_path, range(2, 4), 0, 0, is_cuda=True, settle=settle)
        assert Trainer(run, [hook]).train() == 0
    finally:
        parallel_state.destroy_model_parallel()
    text = gzip.decompress((tmp_path / "log" / "traces" / "rank_0.json.gz").read_bytes())
    kinds = {event.get("cat") for event in json.loads(text)["traceEvents"]}
    assert {"kernel", "gpu_memcpy", "user_annotation"} <= kinds
