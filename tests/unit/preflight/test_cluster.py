"""Processes and rendezvous from DLC, SLURM, torchrun or the machine alone."""


from patch.config import to_yaml
from patch.preflight.cluster import slurm_task
from patch.preflight.parse import parse_args

SLURM = {
    "SLURM_NNODES": "3",
    "SLURM_NODEID": "2",
    "SLURM_JOB_NODELIST": "gpu[03-05]",
    "SLURM_JOB_ID": "1234567",
    "SLURM_GPUS_ON_NODE": "4",
}


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


def test_variables_count_without_positions_too(command):
    lines = to_yaml(command.parse().config).splitlines(keepends=True)
    kept = [line for line in lines if "tokenizer_name_or_path" not in line and "dataset_type" not in line]
    assert len(kept) == len(lines) - 2
    file = command.folder / "run.yaml"
    file.write_text("".join(kept))
    config = parse_args(["--config", str(file)], command.environ, command.machine).config
    assert config.data.tokenizer_name_or_path == str(command.tokenizer)
    assert config.data.dataset_type == "raw"
