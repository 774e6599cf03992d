"""tests/gpu/run.py with files of a test: what counts as a pass, the time limit, going on, the report."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu import run, test_layer
from gpu.nccl_ranks import LAYOUTS, OTHERS, STEPS, WIDE, all_layouts, run_ranks
from gpu.test_nccl import PLACED
from launches import await_end
from training_runs import CPU as CPU_CONTEXT

from patch.device import DeviceContext, MachineFacts
from patch.launch.job import join

RANK = """import subprocess
from pathlib import Path
rank = subprocess.Popen(["sleep", "60"])
Path(__file__).with_suffix(".pid").write_text(str(rank.pid))
"""
FILES = {
    "test_good.py": "def test_it(): print('fine')",
    "test_bad.py": "def test_it(): assert 0",
    "test_skipped.py": "pytestmark.append(pytest.mark.skip(reason='no device'))\ndef test_it(): ...",
    "test_slow.py": "import time\ndef test_it(): time.sleep(60)",
    "test_hung.py": f"{RANK}def test_it(): rank.wait()",
    "test_crashed.py": f"{RANK}def test_it(): __import__('os').abort()",
}
HEAD = '"""About {0}."""\nimport pytest\npytestmark = [pytest.mark.long, pytest.mark.gpu]\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(HEAD.format(name) + text + "\n")
    return tmp_path


def verdicts(folder: Path, *names: str, limit: float = 30.0, code: str = "commit 1") -> dict[str, str]:
    """Outcomes of a call that goes on after the one before."""
    before = run.passed_before(folder / run.RESULTS, [code])
    outcomes = run.check(names, folder, limit, folder, before, [code])
    return {outcome.file: outcome.verdict for outcome in outcomes}


@pytest.mark.long
def test_failures_and_time_are_told_and_a_second_call_goes_on(
    folder: Path, capsys: pytest.CaptureFixture
) -> None:
    names = ("test_good.py", "test_bad.py", "test_skipped.py")
    assert verdicts(folder, *names) == dict(zip(names, ("passed", "FAILED", "skipped"), strict=True))
    (folder / "test_good.py").write_text("assert False, 'it has passed and is not run again'")
    (folder / "test_bad.py").write_text(HEAD.format("") + FILES["test_good.py"])
    found = verdicts(folder, *names)
    assert found == dict(zip(names, ("passed", "passed", "skipped"), strict=True))
    assert verdicts(folder, "test_slow.py", limit=2.0) == {"test_slow.py": "FAILED"}
    assert verdicts(folder, "test_slow.py", limit=0.0) == {"test_slow.py": "not begun"}
    assert verdicts(folder, "test_good.py") == {"test_good.py": "passed"}, "known after calls of other files"
    assert not capsys.readouterr().out
    assert verdicts(folder, "test_good.py", code="commit 2") == {"test_good.py": "FAILED"}
    assert "is not of commit 2: all is run again" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "limit"), [pytest.param("test_hung.py", 10.0, marks=pytest.mark.long), ("test_crashed.py", 30.0)]
)
def test_what_a_file_has_started_ends_with_it(folder: Path, name: str, limit: float) -> None:
    assert verdicts(folder, name, limit=limit) == {name: "FAILED"}
    await_end([int((folder / name).with_suffix(".pid").read_text())])


@pytest.mark.long
def test_a_kill_leaves_no_tests_behind_and_what_was_found_before_it(folder: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from gpu import run; folder = Path(sys.argv[1]);"
        "run.check(sys.argv[2:], folder, 60.0, folder, {}, [])"
    )
    paths = os.pathsep.join(map(str, (run.ROOT, run.ROOT / "tests")))
    command = [sys.executable, "-c", program, str(folder), "test_good.py", "test_hung.py"]
    told = folder / run.RESULTS
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}) as process:
        deadline = time.monotonic() + 30
        while not (told.exists() and "1 passed" in told.read_text() and (folder / "test_hung.pid").exists()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.kill()
    assert {row["file"]: row["code"] for row in json.loads(told.read_text())["outcomes"]} == {
        "test_good.py": 0, "test_hung.py": None,
    }  # fmt: skip
    assert "| test_hung.py | not begun |" in (folder / run.REPORT).read_text()
    await_end([int((folder / "test_hung.pid").read_text())])


def test_nothing_that_ran_is_a_failure(folder: Path, capsys: pytest.CaptureFixture) -> None:
    skipped = run.check(["test_skipped.py"], folder, 30.0, folder, {}, [])
    assert skipped[0].is_good and run.exit_code(skipped) == 1
    assert "no test ran" in capsys.readouterr().out
    good = run.Outcome("test_good.py", 0, 1.0, "1 passed in 1 s", [["a", "2 ms"]])
    assert run.exit_code([good, *skipped]) == 0
    assert run.exit_code([good, run.Outcome("x", None, 0.0, "", [])]) == 1
    text = run.report([good, *skipped], ["- GPUs: none"])
    assert "| a | 2 ms | test_good.py |" in text and "| test_skipped.py | skipped |" in text


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_machine_without_a_gpu_fails_and_says_so() -> None:
    command = [sys.executable, str(Path(run.__file__))]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "FAILED, nothing ran" in done.stdout
    assert not MachineFacts.probe().cuda_devices


def test_every_file_has_a_subject_and_what_tells_most_comes_first() -> None:
    there = {file.name: run.subject(file) for file in run.HERE.glob("test_*.py")}
    assert all(there.values()) and {*run.ALONE, *run.LONG} <= there.keys()
    order = run.in_order([*there])
    assert order[:2] == list(run.FIRST) and order[3:6] == list(run.LONG)


@pytest.mark.usefixtures("one_process")
def test_what_an_8b_layer_is_asked_runs() -> None:
    """On a CPU torch has one fused kernel, under FlashAttention's name."""
    figures, skipped = [], []
    for kernel in test_layer.KERNELS:
        try:
            test_layer.compare_attention(
                CPU_CONTEXT, lambda *pair: figures.append(pair), kernel, **test_layer.SMALL
            )
        except pytest.skip.Exception as why:
            skipped.append(str(why).split(" ", 1)[0])
    assert len(figures) == 1 and "FlashAttention-2" in figures[0][0]
    assert skipped == ["cuDNN:", "FlashAttention-3:", "memory-efficient:"]


def parts(context: DeviceContext, num_ranks: int, folder: Path) -> dict[str, Callable[[], Any]]:
    """For ranks of a test: one part fails on a rank while the other waits, and one hangs."""
    join(context.backend, timedelta(minutes=1))

    def part(name: str) -> str:
        if name == "fails" and dist.get_rank() == 1:
            raise OSError("no such plan")
        time.sleep(0 if name == "second" else 60)
        return name

    own = {name: partial(part, name) for name in ("fails", "second", "hangs")}
    return {"packed": all_layouts(context, num_ranks, folder)["packed"], **own}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_what_ranks_over_nccl_are_asked_runs_over_gloo(tmp_path: Path, monkeypatch) -> None:
    """So that no part fails on a GPU that fails on every machine."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = run_ranks(2, tmp_path, "gpu.nccl_ranks:all_layouts", 600.0)
    assert not found.failures and found.keys() >= LAYOUTS.keys() | OTHERS.keys()
    for name, base in PLACED.items():
        assert found[name] == found[base], name


@pytest.mark.long
@pytest.mark.timeout(900)
def test_what_8_ranks_are_asked_runs_over_gloo(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = run_ranks(8, tmp_path, "gpu.nccl_ranks:wide_layouts", 800.0, part_s=300.0)
    for name in WIDE:
        expected = found[name.split(",")[0]][:STEPS]
        assert len(set(expected)) == STEPS
        assert found[name][:STEPS] == pytest.approx(expected, rel=1e-4), name


@pytest.mark.long
def test_a_part_that_fails_or_hangs_hides_no_other(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    which = "unit.test_gpu_run:parts"
    found = run_ranks(2, tmp_path, which, 200.0, part_s=15.0)
    *losses, _ = found.pop("packed")
    assert len(set(losses)) == STEPS
    assert found == {"second": "second"} and found.seconds.keys() == {"packed", "second"}
    assert "Timeout" not in found.failures["fails"], "the other rank was not waited for"
    for part, why in (("fails", "OSError: no such plan"), ("hangs", "Timeout"), ("other", "not reached")):
        with pytest.raises(pytest.fail.Exception, match=f"^{part}: (.|\n)*{why}"):
            found[part]
    with pytest.raises(pytest.fail.Exception, match="packed: not reached, the time was over"):
        run_ranks(2, tmp_path, which, 0.0)["packed"]
