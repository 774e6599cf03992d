"""`prove` compares a small run with the same code paths; every wrong message in it is found."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from planned_runs import planned_run
from proofs import differences, in_folder, prove_all, shrunk, train_all
from small_runs import small_run

from toolkits.prove import __main__ as prove
from toolkits.prove.compare import Comparison, Difference
from toolkits.prove.shrink import Sizes

LAYOUTS: dict[str, dict[str, Any]] = {
    "TP SP CP by a ring, ZeRO-1": {
        "tp": 2, "cp": 2, "sequence_parallel": True, "cp_comm_type": "p2p", "use_distributed_optimizer": True,
    },
    "PP VPP, ZeRO-2, tied": {
        "pp": 2, "dp": 2, "stage": 1, "data_parallel_sharding": "gradients",
        "untie_embeddings_and_output_weights": False, "global_batch_size": 8,
    },
    "EP ETP TP, experts": {
        "tp": 2, "dp": 2, "sequence_parallel": True, "model_type": "mixtral", "num_experts": 4,
        "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "tp_comm_overlap": False,
    },
    "CP by heads, TP without SP, adapters": {"tp": 2, "cp": 2, "cp_comm_type": "a2a", "lora_rank": 3},
    "TP DP, ZeRO-2, Muon": {
        "tp": 2, "dp": 2, "sequence_parallel": True, "data_parallel_sharding": "gradients",
        "optimizer": "muon", "precision": "fp32",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_whatever_travels_wrong_is_found(name: str, tmp_path: Path) -> None:
    """In any collective of the steps: doubled or skipped sums, missing or swapped parts."""
    run = shrunk(small_run(**LAYOUTS[name]), tmp_path)
    assert not prove_all([run])
    (faults,) = train_all([(in_folder(run.layout, tmp_path / "faults"), None)])
    runs = [(in_folder(run.layout, tmp_path / f"fault{n}"), fault) for n, fault in enumerate(sorted(faults))]
    train_all(runs)
    found = {fault: differences(layout, run.one) for layout, fault in runs}
    print(*(f"{fault.kind} {fault.site}: {each and each[0]}" for fault, each in found.items()), sep="\n")
    assert len(found) >= 8
    assert all(found.values())


BASE = "--model-size 8B --sft --dataset-type raw"
RUN = f"{BASE} --tensor-model-parallel-size 2 --lora-rank 8"


@pytest.mark.long
def test_command_proves_also_a_resume(capsys: pytest.CaptureFixture) -> None:
    assert prove.main(["--", *RUN.split(), "--nproc-per-node=2"]) == 0
    said = capsys.readouterr().out
    assert "processes 2 -> 2" in said and said.count("(bound") == 14
    assert "resumed from one process:" in said and "PASS: matches the single-process run" in said


@pytest.mark.long
def test_proof_that_is_terminated_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "toolkits.prove", "--", *RUN.split(), "--nproc-per-node=2"]
    with subprocess.Popen(command, env=os.environ | {"TMPDIR": str(tmp_path)}) as process:
        while process.poll() is None and not any(tmp_path.glob("prove-*/patch-launch-*")):
            time.sleep(0.05)
        process.terminate()
    assert process.returncode == 143 and not any(tmp_path.iterdir())


def test_difference_has_its_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    found = Comparison({"loss": (0.5, 1e-5)}, [Difference("loss of step 1", 0.5, 1e-5)])
    monkeypatch.setattr(prove, "prove", lambda *unused, **named: {"steps": found})
    assert prove.main(["--", *RUN.split(), "--nproc-per-node=2"]) == 6
    assert "DIFFERS loss of step 1 differs by 0.5, bound 1e-05" in capsys.readouterr().out


NARROW = "--exp-avg-dtype 8bit --exp-avg-sq-dtype bf16 --lora-rank 64 --lora-alpha 64"
WHOLE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"tp": 8, "flags": f"--eval-tasks a {NARROW}"}, {"tp": 2}),
    ({"tp": 8, "pp": 4}, {"tp": 2, "pp": 3}),
    ({"tp": 2, "pp": 4, "cp": 2, "dp": 8}, {"dp": 1, "cp": 2, "pp": 2}),
    ({"cp": 4, "flags": "--cp-comm-type p2p"}, {"cp": 4}),
    ({"cp": 4, "flags": "--cp-comm-type a2a"}, {"cp": 2}),
    ({"dp": 16, "flags": "--num-distributed-optimizer-instances 2"}, {"dp": 4, "instances": 2}),
    ({"dp": 8, "size": "30B-A3B", "flags": "--expert-model-parallel-size 8"}, {"dp": 2, "ep": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("whole", "small"), WHOLE, ids=[str(whole) for whole, _ in WHOLE])
def test_axes_are_as_small_as_keeps_their_code_paths(
    whole: dict[str, Any], small: dict[str, Any], tmp_path: Path
) -> None:
    run = shrunk(planned_run(**whole), tmp_path, is_for_gpus=True)
    sizes = Sizes.of(run.layout)
    assert {name: getattr(sizes, name) for name in small} == small
    assert run.layout.data.eval_tasks is None, "a model of a few words has no scores"
    assert run.layout.optimizer.exp_avg_dtype == run.one.optimizer.exp_avg_dtype == "fp32", "codes"
    assert sizes.processes == run.layout.world_size <= 8 and run.one.world_size == 1


def test_a_warm_up_from_any_rate_can_be_shrunk(tmp_path: Path) -> None:
    run = shrunk(small_run(lr=1e-2, lr_warmup_iters=9, lr_warmup_init=8e-3), tmp_path)
    assert run.layout.optimizer.lr_warmup_init == 0.0
