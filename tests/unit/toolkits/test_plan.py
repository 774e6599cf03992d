"""toolkits.plan: lines and formulas of a run on another machine, the search's command lines, exit codes."""

import json
import re
import shlex

import pytest
from planned_runs import ENVIRON, H100

from patch.plan.flops import flops_per_step
from patch.preflight.parse import parse_args
from toolkits.plan import main

POSITIONS = (
    "dlc 8B 1 128 1e-4 1e-5 8192 8192 bf16 2 1 1 true true true false sel false 500 DATA none none "
    "10000000000 0 OUT"
)
"""LLaMA 8B with TP 2 and DP 8 on two nodes."""


@pytest.mark.parametrize("argv", [POSITIONS, "--model-size 8B --tensor-model-parallel-size 2"])
def test_the_plan_is_of_the_machine_that_is_named(capsys, argv):
    assert main(["--machine", "h100", "--nodes=2", "--tokens=1e12", "--price=2", "--", *argv.split()]) in (
        0,
        1,
    )
    text = capsys.readouterr().out
    assert text.startswith("planned for 2 machines of 8 x NVIDIA H100 80GB HBM3 (79.10 GiB)")
    assert "processes   16 = TP 2 x PP 1 x CP 1 x DP 8 on 2 machines" in text
    assert "parameters  8.03 G (8B)" in text and "time        " in text and "MFU" in text
    assert "budget      1 T tokens take " in text and "price" in text


def test_the_report_adds_up(tmp_path, capsys):
    file = tmp_path / "plan.json"
    options = ["--machine=h100", "--nodes=2", "--tokens=1e12", f"--json={file}", "--explain"]
    assert main([*options, "--", *POSITIONS.split()]) == 0
    report, text = json.loads(file.read_text()), capsys.readouterr().out
    time, budget = report["time"], report["budget"]
    assert report["parameters"] == 8030261248 and report["fits"] is True
    assert sum(part["seconds"] for part in time["parts"]) == pytest.approx(time["step_seconds"])
    assert time["tokens_per_second"] == pytest.approx(128 * 8192 / time["step_seconds"])
    assert budget["days"] * 86400 * time["tokens_per_second"] == pytest.approx(1e12)
    assert budget["device_hours"] == pytest.approx(budget["days"] * 24 * 16) and budget["price"] is None
    argv = [*POSITIONS.split()]
    environ = {**ENVIRON, "WORLD_SIZE": "2", "RANK": "0"}
    config = parse_args(argv, environ, H100.facts).config
    flops = flops_per_step(config).model
    assert time["mfu"] == pytest.approx(flops / time["step_seconds"] / 16 / 989.5e12)
    assert (
        f"= {flops:.4g}" in text and "weights: " in text and "products with weights: 16 micro-batches" in text
    )
    for label in ("parameters", "state/rank", "activations", "memory/rank", "step", "time"):
        before, found, after = text.partition(f"\n{label}")
        assert found and "\n            = " in after, label


def test_the_lines_of_a_search_give_its_layouts(tmp_path, capsys):
    file, plot = tmp_path / "found.json", tmp_path / "found.png"
    options = ["--machine=h100", "--search", "--best=3", f"--json={file}", f"--plot={plot}"]
    assert main([*options, "--", "--model-size=8B", "--seq-length=8192", "--global-batch-size=128"]) == 0
    layouts, text = json.loads(file.read_text())["layouts"], capsys.readouterr().out
    assert len(layouts) == 3 and plot.stat().st_size > 1000
    for layout in layouts:
        assert layout["command"] in text
        program, script, *argv = shlex.split(layout["command"])
        assert (program, script) == ("bash", "examples/llama3_1/run_mcore_llama.sh")
        run = parse_args(argv, {}, H100.facts).config
        assert run.parallel.tensor_model_parallel_size == layout["tp"]
        assert run.parallel.pipeline_model_parallel_size == layout["pp"]
        assert (
            run.training.micro_batch_size == layout["micro_batch"] and run.data_parallel_size == layout["dp"]
        )
        assert run.training.global_batch_size == 128 and run.model.num_layers == 32


def test_a_run_that_does_not_fit_says_what_would(capsys):
    assert main(["--machine=h100", "--devices-per-node=1", "--", "--model-size=8B"]) == 1
    text = capsys.readouterr().out
    assert "fits        no: it would with one of\n            --recompute-granularity selective --opt" in text
    search = ["--machine=h100", "--devices-per-node=1", "--search", "--", "--model-size=70B"]
    assert main([*search, "--global-batch-size=64"]) == 1
    text = capsys.readouterr().out
    nodes = int(re.search(r"^no layout fits 1 devices.* --nodes (\d+)$", text, re.MULTILINE)[1])
    assert main([f"--nodes={nodes}", *search, "--global-batch-size=64"]) == 0


def test_a_cpu_on_which_nothing_fits_is_told_of_its_host_memory(capsys):
    assert main(["--search", "--", "--model-size=405B", "--global-batch-size=1"]) == 1
    text = capsys.readouterr().out
    assert "no layout fits: the host memory of " in text and "devices of this memory" not in text


def test_several_numbers_of_machines_are_compared_by_cost(tmp_path, capsys):
    file = tmp_path / "found.json"
    options = ["--machine=h100", "--nodes=1,4,5", "--price=2", "--search", f"--json={file}", "--"]
    assert main([*options, "--model-size=1B", "--global-batch-size=64", "--lr=1e-4"]) == 0
    layouts, text = json.loads(file.read_text())["layouts"], capsys.readouterr().out
    assert [layout["nodes"] for layout in layouts] == [1, 4], (
        "64 samples and 16 layers do not divide over 40 GPUs"
    )
    for layout in layouts:
        assert layout["devices"] == 8 * layout["nodes"] and layout["price"] == 2 * layout["device_hours"]
        speed = layout["tokens_per_second_per_device"] * layout["devices"]
        assert layout["days"] * 86400 * speed == pytest.approx(1e9)
        assert f"{layout['device_hours']:,.1f}" in text and layout["command"] in text
    assert "device hours of 1 G tokens" in text and "no layout fits 40 devices" in text


def test_a_search_says_which_values_of_its_lines_are_not_the_users(capsys):
    options = ["--machine=h100", "--best=1", "--search", "--"]
    assert main([*options, "--model-size=1B", "--global-batch-size=64", "--lr=1e-4"]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith(
        "not given by you, so set them in the line that you start: 6 MIN_LR 0.0, 7 SEQ_LEN"
    )
    assert "20 DATASET_PATH, 21 VALID_DATASET_PATH none" in said and "GLOBAL_BATCH_SIZE" not in said
    assert main([*options, *POSITIONS.replace("dlc", "dsw").split()]) == 0
    assert "not given" not in capsys.readouterr().out


def test_a_measured_machine_and_this_one_can_be_planned(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text("like: a100\nnetwork_bandwidth: 1e9\n")
    assert (
        main([f"--machine={file}", "--nodes=2", "--", "--model-size=1B", "--use-distributed-optimizer"]) == 0
    )
    assert "NVIDIA A100" in capsys.readouterr().out
    assert main(["--", "--model-size=tiny", "--seq-length=64", "--vocab-size=512"]) == 0
    assert "planned for 1 machine of this machine's CPU" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "no run is given, expected one after `--`"),
        (["--machine=h10", "--", "--model-size=8B"], "got 'h10', did you mean h100?"),
        (["--machine=./none.yaml", "--", "--model-size=8B"], "--machine ./none.yaml: cannot be read"),
        (["--machine=h100", "--", "--model-size=9B"], "--model-size"),
        (["--nodes=1,2", "--", "--model-size=8B"], "--nodes: got 2 numbers, expected one; several with"),
        (["--", "--model-size=auto", "--load=/no/model"], "a plan needs only the shape: give a preset"),
        (["--machine=h100", "--", "--model-size=8B", "--tensor-model-parallel-size=3"], "TP"),
    ],
)
def test_what_cannot_be_planned_is_refused(capsys, argv, message):
    assert main(argv) == 2
    assert message in capsys.readouterr().err
