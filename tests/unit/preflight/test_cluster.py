"""Processes and rendezvous from DLC, SLURM, torchrun or the machine alone."""

import pytest

from patch.config import to_yaml
from patch.device import MachineFacts
from patch.errors import ConfigError
from patch.preflight.cluster import Rendezvous, slurm_task
from patch.preflight.parse import parse_args

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


def test_slurm_needs_srun_or_sbatch(command):
    command.environ.update(SLURM)
    del command.environ["SLURM_NNODES"]
    with pytest.raises(ConfigError, match="SLURM_NNODES is not set, .*start it with srun, or with sbatch"):
        command.parse(ENV="slurm")


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


TASK = {**SLURM, "SLURM_STEP_NUM_TASKS": "12", "SLURM_LOCALID": "1", "SLURM_PROCID": "5"}


def test_one_slurm_task_a_machine_is_its_launcher():
    assert slurm_task("slurm", {**SLURM, "SLURM_STEP_NUM_TASKS": "3", "SLURM_LOCALID": "0"}) == {}
    assert slurm_task("dsw", TASK) == {}, "an interactive shell within an allocation"


def test_several_slurm_tasks_a_machine_are_workers(command):
    """Ranks are counted machine by machine, also if srun deals the tasks out in turn."""
    found = slurm_task("slurm", TASK)
    assert found == {
        "RANK": "9",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "12",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": "24567",
    }
    command.environ.update(TASK, **found)
    parallel = command.parse(ENV="slurm").config.parallel
    assert (parallel.nnodes, parallel.nproc_per_node) == (3, 4)


@pytest.mark.parametrize("uneven", [{"SLURM_STEP_NUM_TASKS": "11"}, {"SLURM_LOCALID": "4"}])
def test_slurm_tasks_are_as_many_on_each_machine(uneven):
    with pytest.raises(ConfigError, match="tasks on 3 machines.*--ntasks-per-node"):
        slurm_task("slurm", {**TASK, **uneven})


def test_several_slurm_tasks_on_one_gpu_are_refused():
    """NCCL would say "Duplicate GPU detected"."""
    with pytest.raises(ConfigError, match="2 GPUs to the 4 tasks.*--ntasks-per-node=2"):
        slurm_task("slurm", {**TASK, "SLURM_GPUS_ON_NODE": "2"})
    without_gpus = {name: text for name, text in TASK.items() if name != "SLURM_GPUS_ON_NODE"}
    assert slurm_task("slurm", without_gpus)["LOCAL_WORLD_SIZE"] == "4"


def test_launcher_of_a_run_that_may_shrink_counts_the_machines(command):
    command.environ.update(LOCAL_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="1")
    elastic = ("--nnodes=4", "--nproc-per-node=1", "--max-restarts=1", "--min-nodes=1")
    assert command.parse(*elastic).config.parallel.nnodes == 2
    assert command.parse(*elastic[:3]).config.parallel.nnodes == 4, "it is refused when it joins the job"


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
    lines = to_yaml(command.parse().config).splitlines(keepends=True)
    kept = [line for line in lines if "tokenizer_name_or_path" not in line and "dataset_type" not in line]
    assert len(kept) == len(lines) - 2
    file = command.folder / "run.yaml"
    file.write_text("".join(kept))
    config = parse_args(["--config", str(file)], command.environ, command.machine).config
    assert config.data.tokenizer_name_or_path == str(command.tokenizer)
    assert config.data.dataset_type == "raw"
