"""The supervisor of local workers, with tiny scripts as workers: environment, exit codes, signals, orphans.

Run as a program this file is a launcher: `python test_launch.py SCRIPT NUM_WORKERS`.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from patch.config import Rendezvous, RunConfig, schema
from patch.device import MachineFacts
from patch.distributed import launch as launch_module
from patch.distributed.launch import INSISTENCE_S, LOST_RANK_CODE, Supervisor, launch, worker_environments
from patch.errors import ConfigError
from patch.storage.lock import hold_run

REPOSITORY = Path(__file__).parents[3]
MACHINE = MachineFacts(cuda_devices=0, cpu_cores=4)
READY_TIMEOUT_S = 60.0


def make_config(num_local: int, num_nodes: int = 1, **training: object) -> RunConfig:
    return RunConfig(
        model=schema.ModelConfig(
            num_layers=2,
            hidden_size=8,
            ffn_hidden_size=8,
            num_attention_heads=2,
            num_query_groups=2,
            kv_channels=4,
            vocab_size=16,
            seq_length=8,
            max_position_embeddings=8,
            rotary_base=1e4,
        ),
        parallel=schema.ParallelConfig(nproc_per_node=num_local, nnodes=num_nodes),
        training=schema.TrainingConfig(
            micro_batch_size=1, global_batch_size=num_local, train_iters=1, **training
        ),
        optimizer=schema.OptimizerConfig(lr=1e-3),
        data=schema.DataConfig(train_data_path="none", max_padding_length=8),
        checkpoint=schema.CheckpointConfig(output_path="none"),
    )


def launch_workers(script: Path, num_local: int) -> int:
    return launch(script, ["--flag"], make_config(num_local), Rendezvous(), MACHINE)


def write_script(folder: Path, body: str) -> Path:
    script = folder / "worker.py"
    script.write_text(f"import os, signal, sys, time\nrank = int(os.environ['RANK'])\n{body}\n")
    return script


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "SETTLE_S", 0.5)
    monkeypatch.setattr(launch_module, "GRACE_S", 0.5)


def test_environment_tells_each_rank_its_place() -> None:
    rendezvous = Rendezvous(node_rank=1, master_addr="10.0.0.1", master_port=1234)
    first, second = worker_environments(make_config(2, num_nodes=3), rendezvous, MACHINE, {"HOME": "/h"})
    assert (first["RANK"], first["LOCAL_RANK"]) == ("2", "0")
    assert (second["RANK"], second["LOCAL_RANK"]) == ("3", "1")
    shared = {"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    shared |= {
        "OMP_NUM_THREADS": "2",
        "RAYON_NUM_THREADS": "2",
        "TOKENIZERS_PARALLELISM": "true",
        "HOME": "/h",
    }
    assert shared.items() <= first.items()


def test_environment_keeps_the_users_own_choices() -> None:
    own = {"OMP_NUM_THREADS": "7", "RAYON_NUM_THREADS": "3", "TOKENIZERS_PARALLELISM": "false"}
    own |= {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    (only,) = worker_environments(make_config(1, deterministic_mode=True), Rendezvous(), MACHINE, own)
    assert own.items() <= only.items()


def test_environment_lets_cublas_be_deterministic_where_it_is_asked() -> None:
    (only,) = worker_environments(make_config(1, deterministic_mode=True), Rendezvous(), MACHINE, {})
    assert only["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    (only,) = worker_environments(make_config(1), Rendezvous(), MACHINE, {})
    assert "CUBLAS_WORKSPACE_CONFIG" not in only


def test_environment_keeps_nccl_from_sums_in_the_switch_where_bits_must_repeat() -> None:
    """NVLS reductions differ from call to call (pytorch#154880)."""
    config = make_config(1, deterministic_mode=True)
    assert worker_environments(config, Rendezvous(), MACHINE, {})[0]["NCCL_ALGO"] == "^NVLS"
    own = {"NCCL_ALGO": "Ring"}
    assert worker_environments(config, Rendezvous(), MACHINE, own)[0]["NCCL_ALGO"] == "Ring"
    assert "NCCL_ALGO" not in worker_environments(make_config(1), Rendezvous(), MACHINE, {})[0]


def test_port_of_the_job_is_none_that_the_kernel_gives_away_before_rank_0_listens() -> None:
    lowest, highest = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    for _ in range(20):
        port = int(worker_environments(make_config(1), Rendezvous(), MACHINE, {})[0]["MASTER_PORT"])
        assert not lowest <= port <= highest
        with socket.socket() as rank_0:
            rank_0.bind(("127.0.0.1", port))


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
    environment = worker_environments(config, Rendezvous(), machine, {})[0]
    assert environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == expected


def test_worker_keeps_to_its_cores(tmp_path: Path) -> None:
    body = f"open(f'{tmp_path}/cores', 'w').write(str(os.sched_getaffinity(0)))"
    core = max(os.sched_getaffinity(0))
    supervisor = Supervisor(tmp_path)
    command = [sys.executable, str(write_script(tmp_path, body))]
    supervisor.start(command, {**os.environ, "RANK": "0"}, {core})
    assert supervisor.wait() == 0
    assert (tmp_path / "cores").read_text() == str({core})


ALLOCATOR, OLDER = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"


def test_environment_asks_for_segments_that_grow_where_the_user_asks_for_nothing() -> None:
    for own, expected in [
        ({}, {ALLOCATOR: "expandable_segments:True"}),
        ({ALLOCATOR: ""}, {ALLOCATOR: ""}),
        ({ALLOCATOR: "backend:native"}, {ALLOCATOR: "backend:native"}),
        ({OLDER: "max_split_size_mb:512"}, {OLDER: "max_split_size_mb:512"}),
    ]:
        (only,) = worker_environments(make_config(1), Rendezvous(), MACHINE, own)
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


def test_success_is_zero_and_passes_the_flags(tmp_path: Path) -> None:
    script = write_script(tmp_path, f"open(f'{tmp_path}/seen{{rank}}', 'w').write(' '.join(sys.argv[1:]))")
    assert launch_workers(script, 2) == 0
    assert [(tmp_path / f"seen{rank}").read_text() for rank in (0, 1)] == ["--flag", "--flag"]


def test_each_ranks_share_of_the_cores_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No OMP handling (the original's defect 13)."""
    body = f"open(f'{tmp_path}/seen{{rank}}', 'w').write(os.environ['OMP_NUM_THREADS'])"
    script = write_script(tmp_path, body)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with caplog.at_level("INFO"):
        launch_workers(script, 2)
        assert [(tmp_path / f"seen{rank}").read_text() for rank in (0, 1)] == ["2", "2"]
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        launch_workers(script, 2)
        assert [(tmp_path / f"seen{rank}").read_text() for rank in (0, 1)] == ["3", "3"]
    assert caplog.messages == [
        "OMP_NUM_THREADS=2 in 2 processes, each one's share of 4 usable cores",
        "OMP_NUM_THREADS=3 in 2 processes, as the environment has it, with 4 usable cores",
    ]


def test_only_a_run_of_one_machine_looks_whether_its_folder_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launchers of several machines belong to one run, whose rank 0 may hold the folder already."""
    script = write_script(tmp_path, f"open(f'{tmp_path}/ran', 'w').write('yes')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("patch.storage.lock._WAIT_S", 0.1)
    with hold_run(Path("none")):
        with pytest.raises(ConfigError, match="none is being written by process"):
            launch_workers(script, 1)
        assert not (tmp_path / "ran").exists()
        assert launch(script, [], make_config(1, num_nodes=2), Rendezvous(1), MACHINE) == 0
        assert (tmp_path / "ran").exists()


def test_one_worker_claims_the_error_report(tmp_path: Path) -> None:
    body = f"""
sys.path.insert(0, {str(REPOSITORY)!r})
from patch.distributed.launch import claim_error_report
open(f'{tmp_path}/claimed{{rank}}', 'w').write(str(claim_error_report()))
sys.exit(2)
"""
    assert launch_workers(write_script(tmp_path, body), 2) == 2
    claims = [(tmp_path / f"claimed{rank}").read_text() for rank in (0, 1)]
    assert sorted(claims) == ["False", "True"]


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ((3, 3), 3),
        ((0, 1), 1),
        ((1, 4), 4),
        ((LOST_RANK_CODE, 3), 3),
        ((LOST_RANK_CODE, 1), 1),
        ((LOST_RANK_CODE, LOST_RANK_CODE), 5),
        ((143, 143), 143),
        ((130, 130), 130),
    ],
    ids=["same", "crash", "cause", "lost-by-cause", "lost-by-crash", "lost-elsewhere", "sigterm", "sigint"],
)
def test_exit_code_of_workers_is_returned(tmp_path: Path, codes: tuple[int, int], expected: int) -> None:
    script = write_script(tmp_path, f"sys.exit({codes}[rank])")
    assert launch_workers(script, 2) == expected


@pytest.mark.parametrize(
    ("name", "reason"),
    [("SIGKILL", "out of memory"), ("SIGABRT", "--distributed-timeout-minutes")],
    ids=["by-the-kernel", "by-nccl"],
)
def test_killed_worker_ends_the_run_with_the_usual_reason(
    tmp_path: Path, short_waits: None, caplog: pytest.LogCaptureFixture, name: str, reason: str
) -> None:
    script = write_script(tmp_path, f"os.kill(os.getpid(), signal.{name}) if rank else time.sleep(60)")
    assert launch_workers(script, 2) == 5
    assert name in caplog.text and reason in caplog.text


def test_failed_worker_ends_one_that_ignores_sigterm(tmp_path: Path, short_waits: None) -> None:
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsys.exit(3) if rank else time.sleep(60)"
    begin = time.monotonic()
    assert launch_workers(write_script(tmp_path, body), 2) == 3
    assert time.monotonic() - begin < 10


ENDLESS = f"""
sys.path.insert(0, {str(REPOSITORY)!r})
import ctypes
from patch.distributed import launch
def wait_for_ever():
    ctypes.PyDLL(None).sleep(120)  # as a destructor that joins a thread: with the interpreter's lock
"""


def test_worker_that_is_done_and_does_not_end_is_ended_with_its_code_and_shows_where_it_stood(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    body = f"{ENDLESS}\nlaunch.END_S = 1\nlaunch.announce_end((0, 3)[rank])\nwait_for_ever()"
    begin = time.monotonic()
    assert launch_workers(write_script(tmp_path, body), 2) == 3
    assert time.monotonic() - begin < 60
    assert "in wait_for_ever" in capfd.readouterr().err
    assert "local rank 0 had done its work but did not end by itself" in caplog.text


def test_worker_that_is_done_and_cannot_end_itself_is_ended_with_its_code(
    tmp_path: Path, short_waits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the interpreter's end nothing of it can."""
    monkeypatch.setattr(launch_module, "END_S", 0.5)
    cancelled = "launch.faulthandler.cancel_dump_traceback_later()"
    body = f"{ENDLESS}\nlaunch.announce_end(0)\n{cancelled}\nwait_for_ever()"
    begin = time.monotonic()
    assert launch_workers(write_script(tmp_path, body), 1) == 0
    assert time.monotonic() - begin < 60


def test_failure_that_was_announced_ends_the_others_before_its_own_end(
    tmp_path: Path, short_waits: None
) -> None:
    body = f"{ENDLESS}\nif rank:\n    launch.announce_end(3)\n    wait_for_ever()\ntime.sleep(60)"
    begin = time.monotonic()
    assert launch_workers(write_script(tmp_path, body), 2) == 3
    assert time.monotonic() - begin < 40


def test_process_that_was_not_launched_lives_on_when_it_is_done() -> None:
    body = "import time; from patch.distributed import launch; launch.END_S = 0.2; launch.announce_end(0); "
    environment = {name: text for name, text in os.environ.items() if name != "PATCH_LAUNCH_FOLDER"}
    program = [sys.executable, "-c", body + "time.sleep(1)"]
    assert subprocess.run(program, env=environment, cwd=REPOSITORY, check=False).returncode == 0


def start_launcher(script: Path, num_local: int) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen([sys.executable, __file__, str(script), str(num_local)], env=environment)


def await_files(*files: Path) -> list[str]:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline, f"{files} were not written in time"
        time.sleep(0.05)
    return [file.read_text() for file in files]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT], ids=["sigterm", "sigint"])
def test_signal_is_forwarded_once_and_waited_for(tmp_path: Path, signum: signal.Signals) -> None:
    body = f"""
count = 0
def stop(signum, frame):
    global count
    count += 1
for each in (signal.SIGTERM, signal.SIGINT):
    signal.signal(each, stop)
open(f'{tmp_path}/ready{{rank}}', 'w').write('yes')
while not count:
    time.sleep(0.05)
time.sleep(1)
open(f'{tmp_path}/saved{{rank}}', 'w').write(str(count))
sys.exit(128 + {int(signum)})
"""
    launcher = start_launcher(write_script(tmp_path, body), 2)
    await_files(tmp_path / "ready0", tmp_path / "ready1")
    launcher.send_signal(signum)
    time.sleep(0.3)
    launcher.send_signal(signum)  # as `timeout` and impatient users do
    assert launcher.wait(30) == 128 + signum
    assert [(tmp_path / f"saved{rank}").read_text() for rank in (0, 1)] == ["1", "1"]


def test_second_signal_after_a_while_ends_workers_that_hang(tmp_path: Path) -> None:
    body = f"""
signal.signal(signal.SIGINT, signal.SIG_IGN)
open(f'{tmp_path}/ready{{rank}}', 'w').write('yes')
time.sleep(120)
"""
    launcher = start_launcher(write_script(tmp_path, body), 2)
    await_files(tmp_path / "ready0", tmp_path / "ready1")
    for pause in (0.5, 0.5, INSISTENCE_S):  # the first two are one impatient person
        assert launcher.poll() is None
        launcher.send_signal(signal.SIGINT)
        time.sleep(pause)
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(30) == 128 + signal.SIGINT


def test_no_worker_outlives_a_killed_launcher(tmp_path: Path) -> None:
    body = f"open(f'{tmp_path}/pid{{rank}}', 'w').write(str(os.getpid()))\ntime.sleep(120)"
    launcher = start_launcher(write_script(tmp_path, body), 2)
    pids = [int(text) for text in await_files(tmp_path / "pid0", tmp_path / "pid1")]
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, "a worker outlived its launcher"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


if __name__ == "__main__":
    sys.exit(launch_workers(Path(sys.argv[1]), int(sys.argv[2])))
