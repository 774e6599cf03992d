"""Processes and rendezvous from DLC, SLURM, torchrun or the machine alone."""

import pytest

from patch.config import parse_args, to_flags
from patch.config.cluster import Rendezvous
from patch.device import MachineFacts
from patch.errors import ConfigError

DLC = {
    "WORLD_SIZE": "2",
    "RANK": "1",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "1234",
    "KUBERNETES_CONTAINER_RESOURCE_GPU": "8",
}
SLURM = {
    "SLURM_NNODES": "3",
    "SLURM_NODEID": "2",
    "SLURM_JOB_NODELIST": "gpu[03-05]",
    "SLURM_JOB_ID": "1234567",
    "SLURM_GPUS_ON_NODE": "4",
}


def test_dsw_without_gpu_starts_one_replica(command):
    invocation = command.parse(TP="2", PP="2")
    assert (invocation.config.parallel.nnodes, invocation.config.parallel.nproc_per_node) == (1, 4)
    assert invocation.rendezvous == Rendezvous(0, "127.0.0.1", 0)


def test_dsw_with_gpus_uses_all_of_them(command):
    command.machine = MachineFacts(cuda_devices=8, cpu_cores=2)
    assert command.parse(TP="2").config.parallel.nproc_per_node == 8


def test_variable_beats_the_machine(command):
    command.machine = MachineFacts(cuda_devices=8, cpu_cores=2)
    command.environ["NPROC_PER_NODE"] = "2"
    assert command.parse().config.parallel.nproc_per_node == 2


def test_flag_beats_the_variable(command):
    command.environ["NPROC_PER_NODE"] = "2"
    assert command.parse("--nproc-per-node", "4").config.parallel.nproc_per_node == 4


def test_dlc_reads_its_variables(command):
    command.environ.update(DLC)
    invocation = command.parse(ENV="dlc")
    assert (invocation.config.parallel.nnodes, invocation.config.parallel.nproc_per_node) == (2, 8)
    assert invocation.rendezvous == Rendezvous(1, "host0", 1234)


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_dlc_names_the_missing_variable(command, variable):
    command.environ.update(DLC)
    del command.environ[variable]
    with pytest.raises(ConfigError, match=f"environment variable {variable} is not set"):
        command.parse(ENV="dlc")


def test_slurm_reads_its_variables(command):
    command.environ.update(SLURM)
    invocation = command.parse(ENV="slurm")
    assert (invocation.config.parallel.nnodes, invocation.config.parallel.nproc_per_node) == (3, 4)
    assert invocation.rendezvous == Rendezvous(2, "gpu03", 24567)


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [("a1", "a1"), ("a1,b2", "a1"), ("n[1,7-9]", "n1"), ("r[02-03]-x,z", "r02-x"), ("h-1,h-2", "h-1")],
)
def test_slurm_meets_at_the_first_host(command, nodelist, first):
    command.environ.update(SLURM, SLURM_JOB_NODELIST=nodelist)
    assert command.parse(ENV="slurm").rendezvous.master_addr == first


def test_slurm_refuses_several_tasks_on_a_machine(command):
    command.environ.update(SLURM, SLURM_STEP_NUM_TASKS="12")
    with pytest.raises(ConfigError, match="12 tasks on 3 machines.*--ntasks-per-node=1"):
        command.parse(ENV="slurm")


def test_machines_by_hand_need_an_address(command):
    with pytest.raises(ConfigError, match="NODE_RANK is not set"):
        command.parse("--nnodes", "2")
    command.environ.update(NODE_RANK="1", MASTER_ADDR="h", MASTER_PORT="99")
    assert command.parse("--nnodes", "2", "--nproc-per-node", "1").rendezvous == Rendezvous(1, "h", 99)


def test_machines_without_gpus_need_a_number_of_processes(command):
    command.environ.update(NODE_RANK="1", MASTER_ADDR="h", MASTER_PORT="99")
    with pytest.raises(ConfigError, match="set NPROC_PER_NODE"):
        command.parse("--nnodes", "2")


def test_torchrun_decides_for_its_workers(command):
    command.environ.update(LOCAL_RANK="0", WORLD_SIZE="8", LOCAL_WORLD_SIZE="4", NPROC_PER_NODE="1")
    parallel = command.parse().config.parallel
    assert (parallel.nnodes, parallel.nproc_per_node) == (2, 4)


def test_variables_count_without_positions_too(command):
    flags = to_flags(command.parse().config)
    named = ("--tokenizer-name-or-path", "--dataset-type")
    kept = [flag for flag in flags if not flag.startswith(named)]
    assert len(kept) < len(flags)
    config = parse_args(kept, command.environ, command.machine).config
    assert config.data.tokenizer_name_or_path == str(command.tokenizer)
    assert config.data.dataset_type == "raw"
