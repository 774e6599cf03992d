"""The launcher's signals, and its end: workers save and nothing outlives it, with tiny scripts as workers."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from launches import await_end, await_files, free_port, launch_workers, start, write_script
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from patch.launch import agent, rendezvous
from patch.launch.worker_process import STOP_SIGNALS, stop_signals
from patch.preflight.cluster import Rendezvous

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def stray_signals() -> Iterator[list[int]]:
    """The launcher is in this process: a signal outside its time fails the test, and does not end pytest."""
    strays: list[int] = []
    before = {each: signal.signal(each, lambda stray, frame: strays.append(stray)) for each in STOP_SIGNALS}
    yield strays
    for number, handler in before.items():
        signal.signal(number, handler)
    assert not strays, "a signal came while no launcher handled it"


@pytest.mark.parametrize(
    ("first", "second"),
    [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGINT), (signal.SIGUSR1, signal.SIGTERM)],
    ids=["timeout", "impatient user", "SLURM"],
)
def test_signal_is_forwarded_once_and_waited_for_whatever_else_comes(
    tmp_path: Path, first: signal.Signals, second: signal.Signals
) -> None:
    """The first worker plays who sends them; SLURM sends SIGUSR1 some time before its limit, then SIGTERM."""
    body = f"""
seen = []
for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(each, lambda number, frame: seen.append(int(number)))
open(f'{tmp_path}/ready{{rank}}', 'w').close()
while not all(os.path.exists(f'{tmp_path}/ready{{each}}') for each in (0, 1)):
    time.sleep(0.05)
if rank == 0:
    os.kill(os.getppid(), {int(first)})
    time.sleep(0.4)
    os.kill(os.getppid(), {int(second)})
while not seen:
    time.sleep(0.05)
time.sleep(0.7)
open(f'{tmp_path}/saved{{rank}}', 'w').write(str(seen))
sys.exit(128 + {int(first)})
"""
    assert launch_workers(write_script(tmp_path, body), 2, max_restarts=1) == 128 + first
    assert [(tmp_path / f"saved{rank}").read_text() for rank in (0, 1)] == [str([int(first)])] * 2


def test_the_end_of_a_terminal_that_nohup_hides_is_not_answered() -> None:
    assert signal.SIGHUP in stop_signals()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in stop_signals() and signal.SIGTERM in stop_signals()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_second_ctrl_c_after_a_while_ends_workers_that_hang(tmp_path: Path) -> None:
    """The worker plays the user."""
    body = f"""
signal.signal(signal.SIGINT, signal.SIG_IGN)
for pause in (0.15, {agent.FORCE_KILL_AFTER_S} + 2.0, 60):  # the first two are one impatient person
    with open('{tmp_path}/lived', 'a') as file:
        file.write('.')
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(pause)
"""
    launcher = start(write_script(tmp_path, body), 1, max_restarts=1)
    assert launcher.wait(200) == 128 + signal.SIGINT
    assert (tmp_path / "lived").read_text() == "..."


def test_signal_to_a_machine_that_waits_ends_the_wait_of_the_others(tmp_path: Path) -> None:
    place, limit = Rendezvous(0, "127.0.0.1", free_port()), timedelta(seconds=30)
    with ThreadPoolExecutor() as threads:
        first, second = (
            rendezvous.RendezvousHandler.join(place._replace(node_rank=rank), [3], limit) for rank in (0, 1)
        )
        taking_part = threads.submit(first.next_rendezvous)
        outside = signal.getsignal(signal.SIGTERM)

        def stop() -> None:
            while signal.getsignal(signal.SIGTERM) is outside:
                time.sleep(0.05)
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGTERM)

        threads.submit(stop)
        assert agent.run_workers(["true"], 1, 0, second, agent.WorkerFiles(str(tmp_path))) == (143, [])
        with pytest.raises(RendezvousClosedError):
            taking_part.result(20)


def test_no_worker_and_nothing_that_it_has_started_outlives_a_killed_launcher(tmp_path: Path) -> None:
    body = f"""
import subprocess
child = subprocess.Popen(['sleep', '120'])
open(f'{tmp_path}/pid{{rank}}', 'w').write(f'{{os.getpid()}} {{child.pid}}')
time.sleep(120)
"""
    launcher = start(write_script(tmp_path, body), 2, max_restarts=1)
    texts = await_files(tmp_path / "pid0", tmp_path / "pid1")
    watching = psutil.Process(launcher.pid).children()
    launcher.kill()
    launcher.wait()
    await_end([*(int(pid) for text in texts for pid in text.split()), *(each.pid for each in watching)])


def test_nothing_stays_after_a_launcher_that_has_ended(tmp_path: Path) -> None:
    before = psutil.Process().children()
    assert launch_workers(write_script(tmp_path, ""), 1) == 0
    assert psutil.Process().children() == before
