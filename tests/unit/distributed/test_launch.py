"""The launcher, with tiny scripts as workers: environment, exit codes, restarts. See test_signals.py too."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from launches import (
    MACHINE,
    REPOSITORY,
    await_files,
    free_port,
    is_running,
    launch_workers,
    make_config,
    start,
    write_script,
)
from small_runs import HALF, ON_HOST, ZERO_3, small_run
from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError

from patch.config import to_yaml
from patch.errors import ConfigError
from patch.launch import RESOLVED, agent, rendezvous
from patch.launch.launcher import worker_environment
from patch.launch.worker_process import LOST_RANK_CODE
from patch.preflight.cluster import Rendezvous


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "SETTLE_S", 0.5)
    monkeypatch.setattr(agent, "KILL_GRACE_S", 0.5)


def test_environment_tells_each_rank_its_place_and_share_of_cores_and_flags_are_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "HOME")
    seen = f"' '.join([*(os.environ[name] for name in {names}), *sys.argv[1:2], *sys.argv[3:]])"
    body = f"open(f'{tmp_path}/seen{{rank}}', 'w').write({seen})\nrun = sys.argv[2]\n"
    body += "mode = os.stat(os.path.dirname(run)).st_mode & 0o077\n"
    body += f"open(f'{tmp_path}/run{{rank}}', 'w').write(f'{{mode}} {{run}}\\n' + open(run).read())"
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("HOME", "/h")
    assert launch_workers(write_script(tmp_path, body), 2) == 0
    found = [(tmp_path / f"seen{rank}").read_text() for rank in (0, 1)]
    assert found == [f"0 0 2 2 2 /h {RESOLVED} --flag", f"1 1 2 2 2 /h {RESOLVED} --flag"]
    place, _, run = (tmp_path / "run1").read_text().partition("\n")
    assert run == to_yaml(make_config(2)), "the workers read the run of their launcher"
    assert place.startswith("0 ") and not Path(place[2:]).exists(), "its folder is the user's own, and goes"


ALLOCATOR, OLDER, QUEUES = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.mark.parametrize(
    ("changes", "name", "expected"),
    [
        ({}, "OMP_NUM_THREADS", "4"),
        ({"deterministic_mode": True}, "CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
        # NVLS reductions differ from call to call (pytorch#154880).
        ({"deterministic_mode": True}, "NCCL_ALGO", "^NVLS"),
        ({}, ALLOCATOR, "expandable_segments:True"),
        # One queue where tensor-parallel layers need it: up to Hopper, Blackwell keeps the order by itself.
        ({"capability": (9, 0)}, QUEUES, None),
        ({"tp": 2, "capability": (9, 0)}, QUEUES, "1"),
        ({"tp": 2, "capability": (9, 0), "tp_comm_overlap": True}, QUEUES, None),
        ({"tp": 2, "capability": (9, 0), "tp_comm_overlap": True, "precision": "fp8"}, QUEUES, "1"),
        ({"tp": 2, "capability": (10, 0)}, QUEUES, None),
        ({"tp": 2, "capability": (9, 0), **ON_HOST}, QUEUES, None),
        ({"tp": 2, "capability": (9, 0), **ZERO_3}, QUEUES, None),
        ({"tp": 2, "capability": (9, 0), **HALF}, QUEUES, None),
        ({"tp": 2, "capability": (9, 0), "cpu_offloading": True}, QUEUES, None),
    ],
)
def test_environment_has_what_the_run_needs_but_for_the_users_own_choices(
    changes: dict, name: str, expected: str | None
) -> None:
    machine = replace(MACHINE, compute_capability=changes.get("capability", (0, 0)))
    config = small_run(**{field: value for field, value in changes.items() if field != "capability"})
    assert worker_environment(config, machine, {}).get(name) == expected
    for own in ("7", ""):
        environment = worker_environment(config, machine, {name: own})
        assert environment[name] == own and (name != OLDER or ALLOCATOR not in environment)


def test_worker_keeps_to_its_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = f"open(f'{tmp_path}/cores', 'w').write(str(os.sched_getaffinity(0)))"
    other, *_, core = sorted(os.sched_getaffinity(0))
    monkeypatch.setattr("patch.launch.launcher.cores_of_workers", lambda *_: [{other}, {core}])
    assert launch_workers(write_script(tmp_path, f"if rank:\n    {body}"), 2) == 0
    assert (tmp_path / "cores").read_text() == str({core})


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


@pytest.mark.long
def test_each_process_has_a_log_of_its_own_for_each_start_beside_what_the_launcher_shows(
    tmp_path: Path, short_waits: None, capfd: pytest.CaptureFixture[str]
) -> None:
    body = "start = os.environ['PATCH_ROUND']\nprint('says', rank, start, file=sys.stderr, flush=True)\n"
    # None ends before both have spoken: the end of one is that of the other.
    body += f"open(f'{tmp_path}/{{rank}}-{{start}}', 'w').close()\n"
    body += f"while not os.path.exists(f'{tmp_path}/{{1 - rank}}-{{start}}'): time.sleep(0.05)\n"
    body += "sys.exit(start == '1')"
    logs = tmp_path / "logs" / "here"
    assert launch_workers(write_script(tmp_path, body), 2, max_restarts=1, log_dir=str(logs)) == 0
    said = [(rank, start) for rank in (0, 1) for start in (1, 2)]
    found = sorted(file.read_text() for file in logs.glob("patch_*/attempt_*/*/stderr.log"))
    assert found == [f"says {rank} {start}\n" for rank, start in said]
    shown = capfd.readouterr().err.splitlines()
    assert all(f"{rank}: says {rank} {start}" in shown for rank, start in said)


def test_log_dir_that_cannot_be_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    script = write_script(tmp_path, f"open(f'{tmp_path}/ran', 'w').write('yes')")
    with pytest.raises(ConfigError, match="worker.py/logs cannot be created: .*Not a directory"):
        launch_workers(script, 1, log_dir=str(script / "logs"))
    assert not (tmp_path / "ran").exists()


CRASH, LOST, WAITING = "sys.exit(1)", f"sys.exit({LOST_RANK_CODE})", "time.sleep(60)"
ABORT = "os.kill(os.getpid(), signal.SIGABRT)"


@pytest.mark.parametrize(
    ("ends", "expected", "said"),
    [
        (("", CRASH), 1, "exit code 1"),
        pytest.param((CRASH, "sys.exit(4)"), 4, "exit code 4", marks=pytest.mark.long),
        ((LOST, "sys.exit(3)"), 3, "exit code 3"),
        pytest.param((LOST, LOST), 5, "another rank ended", marks=pytest.mark.long),
        pytest.param(("sys.exit(143)", "sys.exit(143)"), 143, "exit code 143", marks=pytest.mark.long),
        ((WAITING, "os.kill(os.getpid(), signal.SIGKILL)"), 5, "SIGKILL; the usual reason is that"),
        pytest.param((WAITING, ABORT), 5, "SIGABRT; the usual reason is an error", marks=pytest.mark.long),
    ],
)
def test_exit_code_is_that_of_the_first_known_cause(
    tmp_path: Path, short_waits: None, logged: list[str], ends: tuple[str, str], expected: int, said: str
) -> None:
    body = "\n".join(f"if rank == {rank}:\n    {end or 'pass'}" for rank, end in enumerate(ends))
    assert launch_workers(write_script(tmp_path, body), 2) == expected
    assert sum(said in line for line in logged) == 1


ENDLESS = """
import ctypes
from patch.launch.worker_process import WorkerExit, announce_end
def wait_for_ever():
    ctypes.PyDLL(None).sleep(120)  # as a destructor that joins a thread: with the interpreter's lock
"""


@pytest.mark.long
def test_worker_that_is_done_and_does_not_end_is_ended_with_its_code_and_shows_where_it_stood(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = f"{ENDLESS}\nworker_process.END_S = worker_process.FAILED_END_S = 1\n"
    body += "announce_end((WorkerExit(0), WorkerExit(3, 'why'))[rank])\nwait_for_ever()"
    begin = time.monotonic()
    assert launch_workers(write_script(tmp_path, body), 2) == 3
    assert time.monotonic() - begin < 60
    assert "in wait_for_ever" in capfd.readouterr().err


@pytest.mark.long
def test_worker_that_is_done_and_cannot_end_itself_is_ended_with_its_code(
    tmp_path: Path, short_waits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the interpreter's end nothing of it can."""
    monkeypatch.setattr(agent, "END_S", 0.5)
    cancelled = "worker_process.faulthandler.cancel_dump_traceback_later()"
    body = f"{ENDLESS}\nannounce_end(WorkerExit(0))\n{cancelled}\nwait_for_ever()"
    begin = time.monotonic()
    assert launch_workers(write_script(tmp_path, body), 1) == 0
    assert time.monotonic() - begin < 60


@pytest.mark.long
def test_worker_that_is_done_and_crashes_does_not_end_one_that_still_works(
    tmp_path: Path, short_waits: None
) -> None:
    """As rank 0 that still deletes superseded checkpoints."""
    body = f"""
from patch.launch.worker_process import WorkerExit, announce_end
if rank:
    announce_end(WorkerExit(0))
    os.kill(os.getpid(), signal.SIGSEGV)
time.sleep(1.5)
open('{tmp_path}/deleted', 'w').close()
sys.exit(announce_end(WorkerExit(0)))
"""
    assert launch_workers(write_script(tmp_path, body), 2, max_restarts=1) == 0
    assert (tmp_path / "deleted").exists()


@pytest.mark.long
@pytest.mark.parametrize("code", [75, 143])
def test_stopped_run_that_finds_no_room_for_its_reply_ends_with_its_code_all_the_same(
    tmp_path: Path, short_waits: None, code: int
) -> None:
    body = f"""
from pathlib import Path
from patch.launch.worker_process import WorkerExit, announce_end
Path(os.environ['TORCHELASTIC_ERROR_FILE']).parent.rmdir()
open('{tmp_path}/starts', 'a').write('1')
sys.exit(announce_end(WorkerExit({code})))
"""
    assert launch_workers(write_script(tmp_path, body), 1, max_restarts=1) == code
    assert (tmp_path / "starts").read_text() == "1", "it was stopped, so it must not start again"


COUNT = "\nopen(f'{folder}/starts{rank}', 'a').write(os.environ['PATCH_ROUND'])\n"
"""Each start of the workers has a number of its own."""


@pytest.mark.parametrize(
    ("end", "code", "starts"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", 5, "12"),
        pytest.param("raise RuntimeError('CUDA error')", 1, "123", marks=pytest.mark.long),
        pytest.param(f"sys.exit({LOST_RANK_CODE})", 5, "12", marks=pytest.mark.long),
        pytest.param(
            "worker_process.announce_end(WorkerExit(5, 'not finite'))", 5, "1", marks=pytest.mark.long
        ),
        ("worker_process.announce_end(WorkerExit(3, 'bad row'))", 3, "1"),
        pytest.param("worker_process.announce_end(WorkerExit(143))", 143, "1", marks=pytest.mark.long),
    ],
    ids=["crash", "bug", "lost", "training", "data", "signal"],
)
def test_what_may_pass_is_tried_again_until_the_budget_is_spent(
    tmp_path: Path, short_waits: None, logged: list[str], end: str, code: int, starts: str
) -> None:
    body = f"folder = {str(tmp_path)!r}\nfrom patch.launch.worker_process import WorkerExit{COUNT}"
    body += "others = f'{folder}/starts0'\n"
    body += "while not os.path.exists(others) or os.environ['PATCH_ROUND'] not in open(others).read():\n"
    body += "    time.sleep(0.02)  # it would be killed before it has written its start\n"
    body += f"if rank == 0:\n    time.sleep(60)\n{end}\nsys.exit({code if code != 143 else 0})"
    body = body.replace("time.sleep(60)", "sys.exit()") if code == 143 else body
    budget = len(starts) - 1 or 2
    assert launch_workers(write_script(tmp_path, body), 2, max_restarts=budget) == code
    assert [(tmp_path / f"starts{rank}").read_text() for rank in (0, 1)] == [starts, starts]
    assert sum("ended: " in line for line in logged) == (0 if code == 143 else len(starts))
    assert sum("restart " in line for line in logged) == len(starts) - 1


@pytest.mark.long
def test_worker_that_is_killed_takes_what_it_has_started_with_it(tmp_path: Path, short_waits: None) -> None:
    """A writer that goes on would disturb the writer of the next start."""
    body = f"""
import subprocess
if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':
    child = subprocess.Popen(['sleep', '60'])
    open('{tmp_path}/child', 'w').write(str(child.pid))
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert launch_workers(write_script(tmp_path, body), 1, max_restarts=1) == 0
    child, end = int((tmp_path / "child").read_text()), time.monotonic() + 10
    while is_running(child) and time.monotonic() < end:  # a killed process ends when it has its turn
        time.sleep(0.05)
    assert not is_running(child)


ONE_IS_LOST = f"""
start, world = os.environ['PATCH_ROUND'], os.environ['WORLD_SIZE']
open(f'{{folder}}/start{{start}}_{{rank}}of{{world}}', 'w').write(str(os.getppid()))
while start == '1':
    if os.path.exists(f'{{folder}}/lost'):
        sys.exit({LOST_RANK_CODE})
    time.sleep(0.05)
"""


@pytest.mark.long
def test_the_rest_goes_on_when_a_machine_is_lost_and_takes_it_in_again(tmp_path: Path) -> None:
    """Ranks follow the machines' indices, also if a later machine comes first."""
    body = f"folder = {str(tmp_path)!r}\n{ONE_IS_LOST}if start == '2':\n    time.sleep(60)"
    script, port = write_script(tmp_path, body), free_port()
    settings = {"nnodes": 2, "min_nodes": 1, "max_restarts": 1}
    second, first = (start(script, 1, Rendezvous(rank, "127.0.0.1", port), **settings) for rank in (1, 0))
    found = await_files(tmp_path / "start1_1of2", tmp_path / "start1_0of2")
    assert found == [str(second.pid), str(first.pid)]
    second.kill()
    (tmp_path / "lost").touch()
    assert await_files(tmp_path / "start2_0of1") == [str(first.pid)]
    again = start(script, 1, Rendezvous(1, "127.0.0.1", port), **settings)
    assert (first.wait(200), again.wait(200)) == (0, 0)
    found = await_files(tmp_path / "start3_1of2", tmp_path / "start3_0of2")
    assert found == [str(again.pid), str(first.pid)]


@pytest.mark.long
def test_a_spare_machine_takes_the_place_of_one_that_is_lost(tmp_path: Path) -> None:
    script = write_script(tmp_path, f"folder = {str(tmp_path)!r}\n{ONE_IS_LOST}")
    place = Rendezvous(0, "127.0.0.1", free_port(), num_spares=2)
    settings = {"nnodes": 2, "min_nodes": 2, "max_restarts": 1}
    machines = [start(script, 1, place._replace(node_rank=rank), **settings) for rank in range(4)]
    first, second, *spares = machines
    await_files(tmp_path / "start1_1of2", tmp_path / "start1_0of2")
    second.kill()
    (tmp_path / "lost").touch()
    assert [first.wait(200), *(spare.wait(200) for spare in spares)] == [0, 0, 0]
    found = await_files(tmp_path / "start2_0of2", tmp_path / "start2_1of2")
    assert found == [str(first.pid), str(spares[0].pid)], "the order of the indices"


@pytest.mark.long
def test_spare_that_joins_a_round_that_has_ended_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Rendezvous(0, "127.0.0.1", free_port(), num_spares=1)
    with ThreadPoolExecutor() as threads:
        first, spare = (
            rendezvous.RendezvousHandler.join(place._replace(node_rank=rank), [1], timedelta(seconds=30))
            for rank in (0, 1)
        )
        training = threads.submit(first.next_rendezvous)

        def end_of_the_job() -> None:
            assert training.result(20).rank == 0
            first.shutdown()

        monkeypatch.setattr(spare, "_wait_as_spare", end_of_the_job)
        with pytest.raises(RendezvousGracefulExitError):
            spare.next_rendezvous()


@pytest.mark.long
@pytest.mark.parametrize(
    ("sizes", "num_spares", "num_machines", "num_training"),
    [([1, 3], 0, 2, 1), ([2], 1, 3, 2)], ids=["no layout", "spare"],
)  # fmt: skip
def test_machine_beyond_what_the_batch_allows_waits_until_the_end(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], num_spares: int, num_machines: int, num_training: int
) -> None:
    monkeypatch.setattr(rendezvous, "LAST_CALL_S", 1)
    monkeypatch.setattr(rendezvous, "LINGER_S", 0)
    place = Rendezvous(0, "127.0.0.1", free_port(), num_spares)
    with ThreadPoolExecutor() as threads:
        places = [place._replace(node_rank=rank) for rank in range(num_machines)]
        meetings = [rendezvous.RendezvousHandler.join(each, sizes, timedelta(seconds=30)) for each in places]
        *training, beyond = [threads.submit(each.next_rendezvous) for each in meetings]
        found = [(info.rank, info.world_size) for info in (each.result(20) for each in training)]
        assert found == [(rank, num_training) for rank in range(num_training)]
        with pytest.raises(TimeoutError):
            beyond.result(2.5)
        meetings[-1].leave(closes=True)  # a spare, so this closes nothing
        assert not meetings[0].is_closed()
        meetings[0].shutdown()
        with pytest.raises(RendezvousGracefulExitError):
            beyond.result(20)
