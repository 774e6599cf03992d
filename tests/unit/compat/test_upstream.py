"""What upstream gets wrong or lets a process pay, with compat and without.

A quick start loads no compiler, and an idle rank with all of megatron-core's groups sleeps. When upstream
alone is right, an entry of compat can go. Wrong numbers are in test_faults.py.
"""

import gc
import math
import resource
import subprocess
import sys
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import llama3_tokenizer
import pytest
import torch
import torch.distributed as dist
from distributed_runner import run_distributed
from megatron.core import parallel_state
from megatron.core.tensor_parallel import CheckpointWithoutOutput
from megatron.core.transformer.moe.moe_utils import router_gating_linear
from small_runs import small_run
from training_runs import CPU

from patch import compat
from patch.compat import RELEASE, corrections, cpu, quick_start
from patch.distributed.groups import initialize

REPOSITORY = Path(__file__).parents[3]
COMPILER = set() if find_spec("transformer_engine") else {"torch._dynamo", "torch._inductor.compile_fx"}
"""Transformer Engine, which upstream imports where it is, imports TorchDynamo itself (pytorch/jit.py:51)."""


@pytest.mark.long
def test_a_worker_imports_no_compiler_and_leaves_its_imports_to_no_collection(tmp_path: Path) -> None:
    """Also not with its tokenizer."""
    llama3_tokenizer.tiny_tokenizer().save_pretrained(tmp_path)
    script = (
        "import gc, sys\nfrom patch.compat import quick_start\n"
        "with quick_start():\n    import patch.training.worker\n"
        f"from patch.data.tokenizer import load_tokenizer\nload_tokenizer({str(tmp_path)!r})\n"
        f"print(*({COMPILER} & sys.modules.keys()), gc.get_freeze_count() > 100_000, gc.isenabled())"
    )
    how = {"cwd": REPOSITORY, "capture_output": True, "text": True, "check": True}
    done = subprocess.run([sys.executable, "-c", script], **how)
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_what_is_decorated_is_compiled_or_excepted_when_it_is_called() -> None:
    compiling: list[bool] = []
    traces = partial(torch.compile, backend="eager")  # needs no C++ compiler

    def double(x: torch.Tensor) -> torch.Tensor:
        """Twice as much."""
        compiling.append(torch.compiler.is_compiling())
        return 2 * x

    with mock.patch.object(torch, "compile", traces):
        with quick_start():
            deferred, excepted = torch.compile(double), torch.compiler.disable(double)
            at_once = torch.compile(double, dynamic=True)
        gc.unfreeze()
        assert torch.compile is traces
    ones, twos = torch.ones(2), torch.full((2,), 2.0)
    assert torch.equal(deferred(ones), twos) and compiling == [True]
    assert deferred.__doc__ == "Twice as much." and not hasattr(deferred, "_torchdynamo_orig_callable")
    assert at_once._torchdynamo_orig_callable is double
    compiling.clear()
    assert torch.equal(excepted(ones), twos)
    assert torch.equal(traces(lambda x: excepted(x) + 1)(ones), twos + 1) and compiling == [False, False]


IDLE_S = 0.3


def wake_ups(rank: int, world_size: int, is_mended: bool) -> tuple[int, list[float]]:
    """How often this process wakes in IDLE_S, and what each kind of group sums of the ranks plus one."""
    compat.apply(cuda=False)
    sums = []
    if is_mended:
        groups = initialize(small_run(tp=2), CPU)
        for group in (groups.tp, groups.mp, groups.dp, groups.pp, None):
            dist.all_reduce(value := torch.tensor([rank + 1.0]), group=group)
            sums.append(value.item())
    else:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    dist.barrier()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    time.sleep(IDLE_S)
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before, sums


def test_idle_rank_sleeps_and_its_groups_have_their_own_ranks() -> None:
    """When upstream's no longer wakes for each group, delete `shared_devices` in compat/overhead.py."""
    for rank, (count, sums) in enumerate(run_distributed(wake_ups, 2, True)):
        assert count < 200 * IDLE_S + 50
        assert sums == [3.0, 3.0, rank + 1.0, rank + 1.0, 3.0]
    assert all(count > 1000 * IDLE_S for count, _ in run_distributed(wake_ups, 2, False))


def recompute() -> list[float] | str:
    """The gradient of what is recomputed, where Transformer Engine or its GPU is missing; or the error."""
    hidden = torch.ones(3, requires_grad=True)
    recomputed = CheckpointWithoutOutput()
    try:
        exponential = recomputed.checkpoint(torch.exp, hidden)
        total = (exponential * torch.arange(3)).sum()
        recomputed.discard_output_and_register_recompute(total)
        assert not exponential.untyped_storage().nbytes()
        total.backward()
    except Exception as error:  # noqa: BLE001 - of Transformer Engine or of CUDA
        return str(error)
    assert hidden.grad is not None
    return hidden.grad.tolist()


def route() -> list[float] | str:
    """What a router's product gives, where Transformer Engine is missing; or the error."""
    if find_spec("transformer_engine"):
        return [3.0, 3.0]
    try:
        return router_gating_linear(torch.ones(1, 3), torch.ones(2, 3), None, torch.float32)[0].tolist()
    except NameError as error:
        return str(error)


def run_backward(rank: int, world_size: int, is_corrected: bool) -> tuple[list | str, list | str]:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    if is_corrected:
        corrections.apply()
        corrections.apply()  # the second one changes nothing
    cpu.apply()
    return recompute(), route()


def test_gradients_are_recomputed_and_tokens_routed() -> None:
    """When upstream's no longer ask for Transformer Engine, delete `_init` or the router's name in compat."""
    for recomputed, routed in run_distributed(run_backward, 2, True):
        assert recomputed == pytest.approx([0.0, math.e, 2 * math.e])
        assert routed == [3.0, 3.0]
    for said, routed in run_distributed(run_backward, 2, False):
        assert isinstance(said, str) and ("FP8GlobalStateManager" in said or "CUDA" in said)
        if find_spec("transformer_engine") or RELEASE >= (0, 17):
            assert routed == [3.0, 3.0]
        else:
            assert "te_general_gemm" in routed
