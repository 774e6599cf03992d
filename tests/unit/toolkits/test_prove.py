"""A run's flags are proved by a small run of the same code paths; whatever travels wrong in it is found."""

from pathlib import Path
from typing import Any

import pytest
from proofs import differences, in_folder, prove_all, shrunk, train_all
from small_runs import small_run

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




@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_whatever_travels_wrong_is_found(name: str, tmp_path: Path) -> None:
    """In both steps and in any collective: doubled, missing, swapped or skipped."""
    run = shrunk(small_run(**LAYOUTS[name]), tmp_path)
    assert not prove_all([run])
    (faults,) = train_all([(in_folder(run.layout, tmp_path / "faults"), None)])
    runs = [(in_folder(run.layout, tmp_path / f"fault{n}"), fault) for n, fault in enumerate(sorted(faults))]
    train_all(runs)
    found = {fault: differences(layout, run.one) for layout, fault in runs}
    print(*(f"{fault.kind} {fault.site}: {each and each[0]}" for fault, each in found.items()), sep="\n")
    assert len(found) >= 10
    assert all(found.values())


@pytest.mark.parametrize("name", [*LAYOUTS][1:3])
def test_layout_is_proved(name: str, tmp_path: Path) -> None:
    assert not prove_all([shrunk(small_run(**LAYOUTS[name]), tmp_path)])
