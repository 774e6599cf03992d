"""examples/llama3_1/slurm.sh on a real SLURM cluster: limits, lost processes and nodes, requeues.

The stories run at the same time, because they mostly wait for SLURM.
"""

import json
import math
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from end_to_end.conftest import Office
from end_to_end.shell import REPOSITORY, SCRIPT, call, command, training_records
from launches import free_port
from slurm_cluster import Cluster, running_cluster, why_not

from patch.storage.names import TRACKER

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.timeout(900),
]
SLURM_SCRIPT = SCRIPT.with_name("slurm.sh")
NODES = ["n1", "n2", "n3", "n4", "n5", "n6"]
QUICK_MEETING = f"""#!{sys.executable}
import os, runpy, sys
sys.path.insert(0, {str(REPOSITORY)!r})
if "LOCAL_RANK" not in os.environ:
    from patch.launch import rendezvous
    rendezvous.LAST_CALL_S = rendezvous.HEARTBEAT_S = 2
sys.argv[:] = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Python of the launcher, which waits for lost machines only for seconds."""


LAUNCHER_WITHOUT_A_RUN = """#!/bin/bash
# It ends with a code for each attempt, after steps, and a checkpoint if there is progress.
# On the disk is a copy that a store once refused.
cd "$OUTPUT" && mkdir -p checkpoint
echo 4 > checkpoint/latest_checkpointed_iteration.txt
[ "$SLURM_PROCID" = 0 ] || exit 137
printf '%s\n' "$@" > arguments
echo "{\"iteration\":1${SLURM_RESTART_COUNT:-0}}" > log/metrics.jsonl
[ "$PROGRESS" = no ] || echo "1${SLURM_RESTART_COUNT:-0}" > log/last_saved_iteration.txt
codes=($CODES)
exit "${codes[${SLURM_RESTART_COUNT:-0}]}"
"""


def submit(
    cluster: Cluster,
    output: Path,
    nodes: str,
    arguments: list[str],
    script: Path = SLURM_SCRIPT,
    **variables: object,
) -> str:
    """Submit slurm.sh for both or the remaining one of two nodes; return the job's number."""
    # A requeued job that requires a lost node would never start.
    options = ["--nodes=1-2", "--gpus-per-node=0", "--time=60", "--signal=USR1@120"]
    options += [f"--output={output}.log", f"--exclude={','.join(sorted({*NODES} - {*nodes.split(',')}))}"]
    return cluster.call("sbatch", "--parsable", *options, script, *arguments, **variables).strip()


class Job:
    """A job of slurm.sh on two nodes that does not end by itself.

    Args:
        office: what it trains.
        output: the run's folder.
        nodes: nodes of the cluster on which it may run.
    """

    def __init__(self, cluster: Cluster, office: Office, output: Path, nodes: str) -> None:
        self.cluster, self.output = cluster, output
        python = output.with_name(f"{output.name}-python")
        python.write_text(QUICK_MEETING)
        python.chmod(0o755)
        lengths = {"ENV": "slurm", "TRAIN_TOKENS_OR_ITERS": 10**6, "SAVE_INTERVAL": 5}
        arguments = command(**{**office.positions(output), **lengths, "VALID_DATASET_PATH": "none"})[2:]
        self.number = submit(
            cluster, output, nodes, [*arguments, "--max-restarts=2", "--min-nodes=1"],
            PYTHON=python, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS=1, NPROC_PER_NODE=1,
            MP_DATASET_TYPE="raw", MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port(),
        )  # fmt: skip

    def state(self) -> str:
        return self.cluster.job(self.number)["JobState"]

    def messages(self) -> str:
        files = [Path(f"{self.output}.log"), *sorted(self.output.glob("log/slurm/*/attempt_*/*.log"))]
        return "\n".join(f"{file}:\n{file.read_text()}" for file in files if file.exists())

    def checkpoint(self) -> int:
        file = self.output / "checkpoint" / TRACKER
        return int(file.read_text()) if file.exists() else 0

    def await_true(self, condition: Callable[[], object], what: str) -> None:
        self.cluster.await_true(condition, lambda: f"{what}: {self.messages()}")

    def await_checkpoint(self) -> int:
        before = self.checkpoint()
        self.await_true(lambda: self.checkpoint() > before, "a checkpoint")
        return self.checkpoint()

    def await_message(self, text: str, count: int = 1) -> None:
        self.await_true(lambda: self.messages().count(text) >= count, text)

    def limit(self, minutes: int) -> None:
        self.cluster.call("scontrol", "update", f"JobId={self.number}", f"TimeLimit={minutes}")

    def reach_time_limit(self) -> None:
        """Wait for SLURM's signal before the time limit. Meanwhile the workers sleep, to save CPU time."""
        hours, minutes, _ = map(int, self.cluster.job(self.number)["RunTime"].split("-")[-1].split(":"))
        self.cluster.call(
            "scontrol", "update", f"JobId={self.number}", f"TimeLimit={hours * 60 + minutes + 3}"
        )
        workers = [worker for node in NODES[:2] for worker in self.cluster.processes(node, workers=True)]
        for worker in workers:
            worker.suspend()
        self.await_message("SIGUSR1: waiting")
        for worker in workers:
            worker.resume()


def losses_are_continued(output: Path) -> bool:
    records = training_records(output)
    iterations = [record["iteration"] for record in records]
    return iterations == list(range(1, len(records) + 1)) and all(math.isfinite(r["loss"]) for r in records)


def losing_the_second_node(cluster: Cluster, office: Office, output: Path) -> Job:
    """A worker is killed, the limit comes, the second node is drained, then lost; the user ends the job."""
    job = Job(cluster, office, output, "n1,n2")
    job.await_checkpoint()
    (worker,) = cluster.processes("n2", workers=True)
    worker.send_signal(signal.SIGKILL)
    job.await_message("resumed after step", 1)
    job.await_checkpoint()
    job.reach_time_limit()
    job.await_true(lambda: job.state() == "PENDING", "the requeue")
    job.limit(60)
    job.await_message("resumed after step", 2)
    cluster.call("scontrol", "update", "nodename=n2", "state=drain", "reason=test")
    job.await_checkpoint()
    cluster.lose("n2")
    job.await_message("resumed after step", 3)
    job.await_checkpoint()
    cluster.call("scancel", "--signal=TERM", job.number)
    job.await_true(lambda: job.state() == "FAILED", "the job's end")
    return job


def losing_the_first_node(cluster: Cluster, office: Office, output: Path) -> tuple[Job, int]:
    """The batch script and the rendezvous are lost with it. The other node requests the requeue."""
    job = Job(cluster, office, output, "n3,n4")
    job.await_checkpoint()
    cluster.lose("n3")
    job.await_message("resumed after step")
    found = job.await_checkpoint()
    cluster.call("scancel", job.number)
    job.await_true(lambda: not cluster.call("squeue", "-h", "-j", job.number), "the job's end")
    return job, found


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster(NODES) as made:
        yield made


@pytest.fixture(scope="module")
def stories(
    cluster: Cluster, office: Office, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Future, Future]]:
    folder = tmp_path_factory.mktemp("runs")
    with ThreadPoolExecutor() as threads:
        try:
            yield (
                threads.submit(losing_the_second_node, cluster, office, folder / "first"),
                threads.submit(losing_the_first_node, cluster, office, folder / "second"),
            )
        finally:
            cluster.end()  # ends stories that still wait


TASK = """
import json, os
from patch.preflight.cluster import slurm_task
from patch.errors import ConfigError
try:
    seen = {**os.environ, **slurm_task("slurm", os.environ)}
    names = "RANK LOCAL_RANK LOCAL_WORLD_SIZE CUDA_VISIBLE_DEVICES".split()
    print(json.dumps([seen[name] for name in names]))
except ConfigError as error:
    print(json.dumps(str(error)))
"""


def test_tasks_of_one_process_each_have_a_gpu_or_are_refused(cluster: Cluster, stories: tuple) -> None:
    """With --gpus-per-task SLURM shows each task only its own GPU."""
    srun = ["srun", "--nodes=1", "--ntasks-per-node=2", "--nodelist=n5"]
    program = [sys.executable, "-c", TASK]
    variables = {"PYTHONPATH": REPOSITORY, "MASTER_ADDR": "127.0.0.1"}
    found = cluster.call(*srun, "--gpus-per-task=1", *program, **variables)
    assert sorted(map(json.loads, found.splitlines())) == [["0", "0", "2", "0"], ["1", "1", "2", "1"]]
    found = cluster.call(*srun, "--gpus-per-node=1", *program, **variables)
    assert all("SLURM gives 1 GPUs to the 2 tasks" in line for line in found.splitlines())


@pytest.mark.parametrize(
    ("codes", "progress", "end"),
    [
        ((75, 138, 5, 0), "yes", ("3", "0:0")),
        ((5, 137, 0), "no", ("1", "137:0")),
        ((130,), "yes", ("0", "130:0")),
        ((3,), "yes", ("0", "3:0")),
    ],
    ids=["goes-on", "in-vain", "stop-file", "data"],
)
def test_job_is_requeued_by_the_first_nodes_exit_code_until_it_does_not_help(
    cluster: Cluster, stories: tuple, tmp_path: Path, codes: tuple[int, ...], progress: str, end: tuple
) -> None:
    """The other node is lost (137), which does not matter."""
    launcher, output, folder = tmp_path / "launcher", tmp_path / "out", tmp_path / "with a space"
    folder.mkdir()
    for script in (SCRIPT, SLURM_SCRIPT):
        shutil.copy(script, folder)
    launcher.write_text(LAUNCHER_WITHOUT_A_RUN)
    launcher.chmod(0o755)
    arguments = [*command(ENV="slurm", OUTPUT_BASEPATH=output)[2:], "--log-dir", "my logs"]
    own = {"OUTPUT": output, "CODES": " ".join(map(str, codes)), "PROGRESS": progress}
    job = submit(cluster, output, "n5,n6", arguments, folder / SLURM_SCRIPT.name, PYTHON=launcher, **own)
    ends = ("COMPLETED", "FAILED")
    cluster.await_true(lambda: cluster.job(job)["JobState"] in ends, lambda: cluster.job(job))
    facts = cluster.job(job)
    assert (facts["Restarts"], facts["ExitCode"]) == end, Path(f"{output}.log").read_text()
    passed = (output / "arguments").read_text().splitlines()[1:]
    assert passed[:25] == arguments[:25] and passed[-2:] == ["--log-dir", "my logs"], "the user's own wins"
    assert passed[25:-2] == ["--log-dir", str(output / "log" / "slurm" / job / "ranks")]


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (["slurm"], {}, "SLURM_JOB_ID is not set: start this script with sbatch"),
        (["dsw", "8B"], {"SLURM_JOB_ID": "1"}, "position 1 (ENV): got 'dsw', expected slurm"),
        (["slurm", "8B"], {"SLURM_JOB_ID": "1"}, "got 2 arguments, expected at least the 25 positions"),
    ],
)
def test_wrong_use_is_refused_with_its_cure(arguments: list[str], variables: dict, message: str) -> None:
    done = call(["bash", str(SLURM_SCRIPT), *arguments], **variables)
    assert done.returncode == 2 and message in done.stderr and "usage: sbatch" in done.stderr


def test_run_goes_on_after_a_killed_worker_the_limit_and_a_lost_node_and_stops_when_a_person_says_so(
    stories: tuple[Future, Future],
) -> None:
    job: Job = stories[0].result()
    facts, messages = job.cluster.job(job.number), job.messages()
    assert (facts["Restarts"], facts["ExitCode"]) == ("1", "143:0"), messages
    assert "killed by SIGKILL" in messages and messages.count("restart 1 of 2") >= 2, messages
    assert "stopped by SIGUSR1" in messages and "exit code 138 after step" in messages, messages
    assert "attempt 1 on n[1-2]," in messages, messages
    assert losses_are_continued(job.output)
    assert (job.output / "log" / "slurm" / job.number / "in_vain").read_text() == "0\n"
    logs = [*(job.output / "log" / "slurm" / job.number / "ranks").glob("patch_*/attempt_*/0/stderr.log")]
    assert len(logs) >= 4 + 3, "a node that is late to the meeting adds starts"


def test_run_goes_on_after_the_first_node_is_lost_and_scancel_leaves_a_checkpoint(
    stories: tuple[Future, Future],
) -> None:
    job, checkpoint = stories[1].result()
    facts, messages = job.cluster.job(job.number), job.messages()
    assert (facts["Restarts"], facts["JobState"]) == ("1", "CANCELLED"), messages
    assert "n3 does not answer" in messages and "attempt 1 on n4," in messages, messages
    assert "stopped by SIGTERM" in messages and job.checkpoint() >= checkpoint, messages
    assert job.checkpoint() == len(training_records(job.output)), "no step was lost"
    assert losses_are_continued(job.output)
