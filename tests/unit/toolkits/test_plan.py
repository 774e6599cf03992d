"""toolkits.plan: sums in its JSON are right, its searches' command lines give their layouts, exit codes.

What it prints is in tests/unit/plan/answers.txt.
"""

import contextlib
import json
import re
import shlex
from xml.etree import ElementTree

import pytest
from planned_runs import ENVIRON, H100

from patch.plan.flops import flops_per_step
from patch.preflight.parse import parse_args
from toolkits.plan import main

POSITIONS = (
    "dlc 8B 1 128 1e-4 1e-5 8192 8192 bf16 2 1 1 true true true false sel false 500 DATA none none "
    "10000000000 0 OUT"
).split()
"""LLaMA 8B with TP 2 and DP 8 on two nodes."""


def test_the_report_adds_up(tmp_path):
    file = tmp_path / "plan.json"
    options = ["--machine=h100", "--nodes=2", "--tokens=1e12", f"--json={file}", "--explain"]
    assert main([*options, "--", *POSITIONS]) == 0
    report = json.loads(file.read_text())
    time, budget = report["time"], report["budget"]
    assert report["parameters"] == 8030261248 and report["fits"] is True
    assert sum(part["seconds"] for part in time["parts"]) == pytest.approx(time["step_seconds"])
    assert time["tokens_per_second"] == pytest.approx(128 * 8192 / time["step_seconds"])
    assert budget["days"] * 86400 * time["tokens_per_second"] == pytest.approx(1e12)
    assert budget["device_hours"] == pytest.approx(budget["days"] * 24 * 16) and budget["price"] is None
    config = parse_args(POSITIONS, {**ENVIRON, "WORLD_SIZE": "2", "RANK": "0"}, H100.facts).config
    flops = flops_per_step(config).model
    assert time["mfu"] == pytest.approx(flops / time["step_seconds"] / 16 / 989.5e12)


@pytest.mark.long
def test_the_rows_and_lines_of_a_search_are_its_layouts(tmp_path, capsys):
    file = tmp_path / "found.json"
    options = ["--machine=h100", "--search", "--best=2", f"--json={file}"]
    assert main([*options, "--", "--model-size=8B", "--seq-length=8192", "--global-batch-size=128"]) == 0
    layouts, text = json.loads(file.read_text())["layouts"], capsys.readouterr().out
    assert len(layouts) == 2
    for layout in layouts:
        assert layout["command"] in text
        _, _, *argv = shlex.split(layout["command"])
        run = parse_args(argv, {}, H100.facts).config
        sizes = run.parallel.tensor_model_parallel_size, run.training.micro_batch_size
        assert (*sizes, run.data_parallel_size) == (layout["tp"], layout["micro_batch"], layout["dp"])


def test_a_measured_machine_and_this_one_can_be_planned(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text("like: a100\nnetwork_bandwidth: 1e9\n")
    run = ["--", "--model-size=1B", "--use-distributed-optimizer"]
    assert main([f"--machine={file}", "--nodes=2", *run]) == 0
    assert "NVIDIA A100" in capsys.readouterr().out
    assert main(["--", "--model-size=tiny", "--seq-length=64", "--vocab-size=512"]) == 0
    out = capsys.readouterr().out
    assert "planned for 1 machine of this machine's CPU" in out and "MFU" not in out  # its peak is not known
    assert main(["--search", "--", "--model-size=405B", "--global-batch-size=1"]) == 1
    assert "no layout fits the memory of 1 devices and their hosts: take" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "is_said"), [("h100", False), ("h200", True)])
def test_a_search_says_that_narrow_moments_need_no_host(capsys, name, is_said):
    options = [f"--machine={name}", "--devices-per-node=1", "--search"]
    assert main([*options, "--", "--model-size=8B", "--seq-length=8192"]) == 0
    said = "--exp-avg-sq-dtype bf16 (other numerics) no states are on the host"
    assert (said in capsys.readouterr().out) == is_said


def test_a_removed_flag_names_what_to_do(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--search", "--plot=a.png", "--", "--model-size=8B"])
    assert "--plot was removed: plan a line that was found" in capsys.readouterr().err


STAGES = ["--", "--model-size=8B", "--pipeline-model-parallel-size=4", "--use-distributed-optimizer"]


def test_schedules_are_drawn_in_the_terminal_and_as_svg(tmp_path, capsys):
    file = tmp_path / "drawn.svg"
    assert main(["--machine=h100", f"--schedule={file}", *STAGES, "--global-batch-size=8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    titles = [number for number, line in enumerate(lines) if "stages idle" in line and ", PP 4" in line]
    assert [lines[n].partition(",")[0] for n in titles] == ["1F1B", "interleaved 1F1B", "all forward"]
    assert all("idle 75.0%" in lines[n] and "= 75.0%" in lines[n] for n in titles[::2])
    assert lines[titles[0] + 4].rstrip() == "rank 3            F1 B1--- F2 B2--- F3 B3--- F4 B4---"
    drawn = "".join(ElementTree.fromstring(file.read_text()).itertext())
    assert len(re.findall(r"[FB]\d[ab]?", drawn.replace("1F1B", ""))) == 2 * 4 * 4 * (1 + 2 + 1)  # VPP 2
    assert "the first" not in drawn


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--schedule", "--", "--model-size=1B"], "got a run with PP 1, expected PP of at least 2"),
        (["--failures-per-week=1", *STAGES], "expected --tokens beside it"),
    ],
)
def test_what_cannot_be_drawn_or_counted_is_refused(options, message, capsys):
    with contextlib.suppress(SystemExit):
        assert main(["--machine=h100", *options]) == 2
    assert message in capsys.readouterr().err
