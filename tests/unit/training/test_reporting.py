"""Metrics reach services, and no service touches training: four real libraries, and libraries that fail.

SERVICES names a folder with the libraries, made by `pip install --target` (as .ci/run does). They work in
their own offline modes, whose files are read here; MLflow with its server, too.
"""

import json
import os
import re
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import pytest
from launches import free_port

from patch.training.forwarder import _OPEN, Target, without_credentials
from patch.training.hooks import reporting
from patch.training.hooks.metrics import MetricsLog
from patch.training.hooks.reporting import Reporter

SERVICES = os.environ.get("SERVICES", "")
OFFLINE = {"WANDB_MODE": "offline", "SWANLAB_MODE": "offline", "TRACKIO_DIR": "trackio"}
OFFLINE |= {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_TRACKING_URI": "file:mlruns"}
GOOD = """
import os
file = open(os.path.join(os.path.dirname(__file__), "taken"), "a", buffering=1)
class url: url = "https://user:secret@host/page?key=secret"
def init(**told): print(told["id"], told["config"]["checkpoint.save"], file=file); return opened
def log(values, step):
    print(step, *values.values(), file=file)
    LOG
def finish(): print("finished", file=file)
opened = url()
opened.log = log
"""
ENDS = {
    "raise OSError('no http://me:secret@host')": "OSError('no http://host')",
    "import time; time.sleep(600)": "it did not finish in time",
    "os._exit(0)": "it ended with exit code 0",
    "import sys; sys.exit()": "SystemExit()",
    "os.kill(os.getpid(), 9)": "it ended with exit code -9",
}


def trained(folder: Path, start: int, steps: range, services: list[str], is_killed: bool = False) -> None:
    """The hooks of a run that logs these steps, and evaluates after every second one."""
    log, report = MetricsLog(folder, start), Reporter(folder, services, start)
    for step in steps:
        records = [{"loss": step + 0.40625, "mfu": None}, {"valid_loss/a(b)": step + 0.25}][: 2 - step % 2]
        for hook in (log, report):
            for record in records:
                hook.on_log({"iteration": step, **record})
    log.close()
    if is_killed:  # what the kernel does then
        for each in report._forwarders:
            each._process.stdin.close()
            each._process.wait(30)
    else:
        report.close()
    assert all(each._process.poll() is not None for each in report._forwarders)


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder in a checkout, whose configuration and origin have secrets; a folder for libraries."""
    (tmp_path / "lib").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "lib")
    origin = ["remote", "add", "origin", "https://user:secret@host/repository.git"]
    for words in (["init", "--quiet"], origin):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("checkpoint:\n  save: s3://me:secret@host/x?key=1\n")
    return folder


def taken(output: Path) -> list[str]:
    return (output.parent / "lib" / "taken").read_text().splitlines()


def test_each_record_is_sent_once_also_after_a_resume(output: Path, logged: list[str]) -> None:
    (output.parent / "lib" / "wandb.py").write_text(GOOD.replace("LOG", "os._exit(1) if step == 7 else None"))
    trained(output, 0, range(1, 5), ["wandb"])
    (run, save), *records = (line.split() for line in taken(output))
    sent = "1 1.40625, 2 2.40625, 2 2.25, 3 3.40625, 4 4.40625, 4 4.25, finished"
    assert records == [line.split() for line in sent.split(", ")] and save == "s3://host/x"
    assert logged == ["wandb: https://host/page", "wandb: everything was sent"]
    trained(output, 2, range(3, 7), ["wandb"], is_killed=True)  # steps 3 and 4 a second time
    assert [line.split() for line in taken(output)][8:] == [
        [run, save], ["5", "5.40625"], ["6", "6.40625"], ["6", "6.25"], ["finished"]
    ]  # fmt: skip
    trained(output, 6, range(7, 8), ["wandb"])  # 7 arrives, but its receipt does not
    (output.parent / "lib" / "wandb.py").write_text(GOOD.replace("LOG", ""))
    trained(output, 7, range(8, 8), ["wandb"])  # the same command again, which has nothing to train
    assert [line.split()[0] for line in taken(output)][13:] == [run, "7", run, "7", "finished"]
    trained(output, 0, range(1, 2), ["wandb"])  # begun anew in the same folder
    assert taken(output)[-2:] == ["1 1.40625", "finished"] and taken(output)[-3].split()[0] != run


@pytest.mark.timeout(100)
@pytest.mark.parametrize(("place", "fault"), [*(("log", fault) for fault in ENDS), ("init", [*ENDS][0])])
@pytest.mark.long
def test_library_that_fails_is_a_warning(
    output: Path, logged: list[str], monkeypatch: pytest.MonkeyPatch, fault: str, place: str
) -> None:
    monkeypatch.setattr(reporting, "FINISH_S", 3)
    monkeypatch.setattr(reporting, "_GRACE_S", 1)
    body = f"import os\n{fault}" if place == "init" else GOOD.replace("LOG", fault)
    (output.parent / "lib" / "wandb.py").write_text(body)
    trained(output, 0, range(1, 40), ["wandb"])
    lines = [json.loads(line) for line in (output / "log/metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 39 + 19
    assert f"wandb: {ENDS[fault]}; training is not affected, and the same command sends the rest" in logged


def test_names_that_mlflow_does_not_take_stay_different() -> None:
    names, taken = ["a(b)", "a,b", "a_b", "a:b", "a:2c:b", "a/b-c.d e", "\u6570"], list[dict[str, float]]()
    library = SimpleNamespace(
        start_run=lambda **_: SimpleNamespace(info=SimpleNamespace(run_id="1")),
        end_run=None,
        log_metrics=lambda values, step: taken.append(values),
    )
    _OPEN["mlflow"](library, Target("run", {}, "1", False)).log(dict.fromkeys(names, 1.0), step=1)
    assert len(taken[0]) == len(names) and {"a_b", "a/b-c.d e"} <= taken[0].keys()
    assert all(re.fullmatch(r"[/\w.\- :]+", key, re.ASCII) for key in taken[0])


def test_urls_lose_what_is_secret() -> None:
    for text, left in {
        "see http://me:p@ss@host:80/a@b?token=x or s3://k:s@bucket/run": "see http://host:80/a@b or s3://bucket/run",
        "me@host /a?b=1 org/name": "me@host /a?b=1 org/name",
    }.items():
        assert without_credentials(text) == left


def _losses(output: Path, service: str, found: bytes) -> list[float]:
    """In the order of steps what the service's own files have; of binary ones those of eight in them."""
    if service == "mlflow":
        (file,) = output.glob("mlruns/*/*/metrics/loss")
        return [float(line.split()[1]) for line in file.read_text().splitlines()]
    if service == "mlflow server":
        with sqlite3.connect(output / "server.db") as board:
            rows = board.execute("select value from metrics where key='loss' order by step")
            return [value for (value,) in rows]
    if service == "trackio":
        with sqlite3.connect(next(output.glob("trackio/*.db"))) as board:
            rows = [json.loads(row[0]) for row in board.execute("select metrics from metrics order by step")]
        return [row["loss"] for row in rows if "loss" in row]
    numbers = [step + 0.40625 for step in range(1, 9)]
    return [x for x in numbers if str(x).encode() in found or struct.pack("<d", x) in found]


@pytest.fixture
def server(output: Path) -> Iterator[str]:
    """MLflow's server on this machine; its database is among the run's files."""
    if not Path(SERVICES, "flask").is_dir():
        pytest.skip("SERVICES has no MLflow server")
    address = f"127.0.0.1:{(port := free_port())}"
    words = f"-m mlflow server --port {port} --backend-store-uri sqlite:///server.db --workers 1".split()
    environ = {**os.environ, "PYTHONPATH": SERVICES}
    process = subprocess.Popen([sys.executable, *words], cwd=output, env=environ, start_new_session=True)
    for _ in range(600):
        with suppress(OSError), urlopen(f"http://{address}/health"):
            break
        time.sleep(0.2)
    else:
        pytest.fail("MLflow's server did not start")
    yield f"http://me:secret@{address}"
    os.killpg(process.pid, signal.SIGKILL)  # it has processes of its own


@pytest.mark.long
@pytest.mark.skipif(not SERVICES, reason="SERVICES names no folder with the services' libraries")
@pytest.mark.parametrize("service", ["wandb", "mlflow", "mlflow server", "swanlab", "trackio"])
def test_service_has_the_losses_and_no_secret(
    output: Path, logged: list[str], monkeypatch: pytest.MonkeyPatch, service: str, request: Any
) -> None:
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    if service == "mlflow server":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", request.getfixturevalue("server"))
    library = service.split()[0]
    monkeypatch.syspath_prepend(SERVICES)
    monkeypatch.setattr(reporting, "FINISH_S", 100)  # a busy machine
    trained(output, 0, range(1, 4), [library])
    trained(output, 2, range(3, 5), [library])
    assert logged[-1] == f"{library}: everything was sent"
    shutil.rmtree(output / "log")
    found = b"".join(file.read_bytes() for file in output.rglob("*") if file.is_file())
    assert _losses(output, service, found) == [1.40625, 2.40625, 3.40625, 4.40625]
    assert b"valid_loss" in found and b"s3://host/x" in found
    assert found.count(b":secret") == (output / "config.yaml").read_text().count(":secret") == 1
    assert "secret" not in "".join(logged)
