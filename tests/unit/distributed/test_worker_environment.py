"""The environment that the launcher gives to its workers; what users have set stays."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from launches import MACHINE, make_config

from patch.device import MachineFacts
from patch.distributed.launch import worker_environment

REPOSITORY = Path(__file__).parents[3]


def test_environment_keeps_the_users_own_choices() -> None:
    own = {"OMP_NUM_THREADS": "7", "RAYON_NUM_THREADS": "3", "TOKENIZERS_PARALLELISM": "false"}
    own |= {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    only = worker_environment(make_config(1, deterministic_mode=True), MACHINE, own)
    assert own.items() <= only.items()


def test_environment_lets_cublas_be_deterministic_where_it_is_asked() -> None:
    only = worker_environment(make_config(1, deterministic_mode=True), MACHINE, {})
    assert only["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    only = worker_environment(make_config(1), MACHINE, {})
    assert "CUBLAS_WORKSPACE_CONFIG" not in only


def test_environment_keeps_nccl_from_sums_in_the_switch_where_bits_must_repeat() -> None:
    """NVLS reductions differ from call to call (pytorch#154880)."""
    config = make_config(1, deterministic_mode=True)
    assert worker_environment(config, MACHINE, {})["NCCL_ALGO"] == "^NVLS"
    own = {"NCCL_ALGO": "Ring"}
    assert worker_environment(config, MACHINE, own)["NCCL_ALGO"] == "Ring"
    assert "NCCL_ALGO" not in worker_environment(make_config(1), MACHINE, {})


@pytest.mark.parametrize(
    ("tp", "capability", "expected"), [(1, 9, None), (2, 0, "1"), (2, 9, "1"), (2, 10, None), (2, 12, None)]
)
def test_environment_has_one_queue_where_tensor_parallel_layers_need_it(
    tp: int, capability: int, expected: str | None
) -> None:
    """Up to Hopper: Blackwell keeps the order by itself."""
    config = make_config(2)
    config = replace(config, parallel=replace(config.parallel, tensor_model_parallel_size=tp))
    machine = MachineFacts(cuda_devices=2, cpu_cores=4, compute_capability=capability)
    environment = worker_environment(config, machine, {})
    assert environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == expected


ALLOCATOR, OLDER = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"


def test_environment_asks_for_segments_that_grow_where_the_user_asks_for_nothing() -> None:
    for own, expected in [
        ({}, {ALLOCATOR: "expandable_segments:True"}),
        ({ALLOCATOR: ""}, {ALLOCATOR: ""}),
        ({ALLOCATOR: "backend:native"}, {ALLOCATOR: "backend:native"}),
        ({OLDER: "max_split_size_mb:512"}, {OLDER: "max_split_size_mb:512"}),
    ]:
        only = worker_environment(make_config(1), MACHINE, own)
        assert {name: only[name] for name in (ALLOCATOR, OLDER) if name in only} == expected


def test_a_worker_of_the_users_own_torchrun_asks_for_them_before_torch_is_imported() -> None:
    """The machine is probed first of all, which may start CUDA; what is there then is printed."""
    program = (
        "import os, runpy, sys; from patch.device import MachineFacts\n"
        "def probe():\n"
        f"    print(os.environ.get('{ALLOCATOR}'), 'torch' in sys.modules, flush=True); os._exit(0)\n"
        "MachineFacts.probe = probe; sys.argv[1:] = []\n"
        "runpy.run_path('examples/llama3_1/pretrain_llama.py', run_name='__main__')"
    )
    environ = {name: text for name, text in os.environ.items() if name not in (ALLOCATOR, OLDER)}
    for own, expected in [({"LOCAL_RANK": "0"}, "expandable_segments:True False"), ({}, "None False")]:
        found = subprocess.run(
            [sys.executable, "-c", program], env=environ | own, cwd=REPOSITORY, capture_output=True, text=True
        )
        assert found.stdout.strip() == expected, found.stderr
