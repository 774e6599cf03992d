"""A run's flags are proved by a small run of the same code paths; whatever travels wrong in it is found."""

import json
from pathlib import Path
from typing import Any

import pytest
from covering_rows import ROWS, run_of
from planned_runs import ready_runs
from proofs import HERE, compared, in_folder, run_all, small
from small_runs import small_run
from wrong_messages import Fault

from patch.checks.rules import RULES
from patch.config.schema import RunConfig
from toolkits.prove import __main__ as prove
from toolkits.prove.compare import Comparison, Difference
from toolkits.prove.shrink import Shrunk, Sizes, shrink

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
}  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", LAYOUTS)
def test_whatever_travels_wrong_is_found_and_named(name: str, tmp_path: Path) -> None:
    run = small(small_run(**LAYOUTS[name]), tmp_path)
    run_all([(run.one, None)])
    (faults,) = run_all([(run.layout, None)])
    assert not compared(run.layout, run.one).differences
    runs = [(in_folder(run.layout, tmp_path / f"fault{n}"), fault) for n, fault in enumerate(sorted(faults))]
    run_all(runs)
    found = {fault: compared(layout, run.one).differences for layout, fault in runs}
    (tmp_path / "faults.txt").write_text("\n".join(f"{f}: {d and d[0]}" for f, d in found.items()))
    print((tmp_path / "faults.txt").read_text())
    assert len(found) >= 12
    assert all(found.values())


def proof(row: dict[str, str], folder: Path) -> list[Difference]:
    run = small(run_of(row), folder)
    run_all([(run.one, None)])
    run_all([(run.layout, None)])
    return compared(run.layout, run.one).differences


SAMPLE = (1, 5)


@pytest.mark.parametrize("number", SAMPLE)
def test_row_is_proved(number: int, tmp_path: Path) -> None:
    assert not proof(ROWS[number], tmp_path)
