"""Fine-tuning through the shell over two processes: files, export, SIGTERM, resume, restart."""

import json
import math
import os
import random
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from end_to_end.conftest import Office
from end_to_end.shell import (
    assert_same_weights,
    await_steps,
    call,
    call_workers,
    command,
    cut_back,
    environment,
    loss_in_transformers,
    losses,
    start,
    training_records,
    worker_of,
)
from launches import free_port

from toolkits.convert import main as convert

NUM_STEPS = 40
SAVE_STEPS = 25
# The two frameworks sum float32 products in different orders.
LOSS_TOLERANCE = 1e-4
STEP_KEYS = (
    "iteration consumed_samples consumed_tokens loss grad_norm lr step_time_ms tokens_per_s_per_gpu "
    "tflops_per_gpu hardware_tflops_per_gpu mfu hfu peak_memory_gib host_memory_gib skipped "
    "offload_fraction comm_exposed_ms data_wait_ms save_stall_ms save_write_s"
).split()


def sft_command(office: Office, output: Path, **changes: str) -> list[str]:
    """Return a command with four micro-batches per step, so that a signal can arrive within a step."""
    lengths = {"GLOBAL_BATCH_SIZE": 16, "TRAIN_TOKENS_OR_ITERS": NUM_STEPS, "SAVE_INTERVAL": SAVE_STEPS}
    flags = ["--eval-interval", str(NUM_STEPS // 2), "--export-hf"]
    return [*command(**office.positions(output), **{**lengths, **changes}), *flags]


@pytest.fixture(scope="module")
def unbroken(office: Office, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "unbroken"
    result = call([*sft_command(office, output), "--profile", "2:3"])
    assert result.returncode == 0, result.stderr
    output.with_name("messages").write_text(result.stderr)
    return output


def latest_checkpoint(output: Path) -> int:
    return int((output / "checkpoint" / "latest_checkpointed_iteration.txt").read_text())


def validation_losses(output: Path) -> dict[int, float]:
    lines = map(json.loads, (output / "log" / "metrics.jsonl").read_text().splitlines())
    return {line["iteration"]: line["valid_loss"] for line in lines if "valid_loss" in line}


def test_run_leaves_its_files(unbroken: Path) -> None:
    for name in ("config.yaml", "log/loss.png", "hf/config.json", "hf/tokenizer.json", "tensorboard"):
        assert (unbroken / name).exists(), name
    traces = sorted(path.name for path in (unbroken / "log" / "traces").iterdir())
    assert traces == ["rank_0.json.gz", "rank_1.json.gz"]
    assert latest_checkpoint(unbroken) == NUM_STEPS
    records = training_records(unbroken)
    assert [record["iteration"] for record in records] == list(range(1, NUM_STEPS + 1))
    assert sorted(records[0]) == sorted(STEP_KEYS)
    found = validation_losses(unbroken)
    assert list(found) == [NUM_STEPS // 2, SAVE_STEPS, NUM_STEPS], "also at each save"
    best = (unbroken / "checkpoint" / "best_checkpointed_iteration.txt").read_text()
    assert int(best) == min((SAVE_STEPS, NUM_STEPS), key=found.__getitem__)


def test_no_library_warns_the_user(unbroken: Path) -> None:
    """Neither does a library warn while a worker imports it."""
    messages = unbroken.with_name("messages").read_text()
    assert "INFO Hugging Face folder written" in messages and "Warning" not in messages, messages


def test_the_log_says_layout_and_planned_memory_once(unbroken: Path) -> None:
    messages = unbroken.with_name("messages").read_text()
    assert messages.count("INFO processes   2 = TP 1 x PP 1 x CP 1 x DP 2 on 1 machine") == 1
    assert "4 micro-batches a replica" in messages
    assert messages.count("INFO memory/rank ") == 1 and "= weights " in messages


def test_loss_falls(unbroken: Path) -> None:
    values = losses(unbroken)
    assert sum(values[-5:]) < 0.5 * sum(values[:5])


def test_validation_loss_is_that_of_the_export_in_transformers(office: Office, unbroken: Path) -> None:
    expected = loss_in_transformers(unbroken / "hf", office.held_out)
    assert validation_losses(unbroken)[NUM_STEPS] == pytest.approx(expected, abs=LOSS_TOLERANCE)


def test_checkpoint_converts_to_the_export_byte_for_byte(unbroken: Path, tmp_path: Path) -> None:
    """Without --hf-config: the run's configuration names model and tokenizer."""
    assert convert(["mcore2hf", "--load", str(unbroken), "--save", str(tmp_path / "hf")]) == 0
    converted, exported = (
        {path.name: path.read_bytes() for path in folder.iterdir()}
        for folder in (tmp_path / "hf", unbroken / "hf")
    )
    assert converted == exported


def test_checkpoint_whose_tokenizer_is_gone_asks_for_hf_config(
    office: Office, unbroken: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run = shutil.copytree(unbroken, tmp_path / "run")
    config = run / "config.yaml"
    config.write_text(config.read_text().replace(str(office.model), str(tmp_path / "gone")))
    arguments = ["mcore2hf", "--load", str(run), "--save", str(tmp_path / "hf")]
    assert convert(arguments) == 4
    message = capsys.readouterr().err
    assert f"{tmp_path / 'gone'} is not a folder" in message and "--hf-config" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    assert convert([*arguments, "--hf-config", str(office.model)]) == 0
    assert_same_weights(tmp_path / "hf", unbroken / "hf")


def start_machine(rank: int, port: int, office: Office, output: Path) -> subprocess.Popen:
    """Start the launcher of one of two machines, with one process."""
    place = {"WORLD_SIZE": 2, "RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    arguments = sft_command(office, output, ENV="dlc")
    return start(arguments, environment(**place, NPROC_PER_NODE=1))


def start_task(rank: int, port: int, office: Office, output: Path) -> subprocess.Popen:
    job = {"SLURM_NNODES": 1, "SLURM_STEP_NUM_TASKS": 2, "SLURM_NODEID": 0, "SLURM_LOCALID": rank}
    arguments = sft_command(office, output, ENV="slurm")
    return start(arguments, environment(**job, MASTER_ADDR="127.0.0.1", MASTER_PORT=port))


def stop_one_of_two(processes: list[subprocess.Popen], output: Path) -> None:
    """Send SIGTERM to the second after a few steps. Both must end with a checkpoint and the signal's code."""
    await_steps(output, 3, processes[0])
    processes[1].send_signal(signal.SIGTERM)
    for process in processes:
        _, messages = process.communicate(timeout=120)
        assert process.returncode == 143, messages
    assert 3 <= latest_checkpoint(output) < NUM_STEPS


@pytest.mark.long
def test_one_slurm_task_for_each_process_trains_as_our_launcher_does(
    office: Office, unbroken: Path, tmp_path: Path
) -> None:
    port = free_port()
    stop_one_of_two([start_task(rank, port, office, tmp_path / "out") for rank in (0, 1)], tmp_path / "out")
    found = losses(tmp_path / "out")
    assert found == losses(unbroken)[: len(found)]


@pytest.mark.long
def test_resume_after_sigterm_to_one_of_two_machines_repeats_the_run_with_states_in_host_memory_too(
    office: Office, unbroken: Path, tmp_path: Path
) -> None:
    port = free_port()
    stop_one_of_two(
        [start_machine(rank, port, office, tmp_path / "out") for rank in (0, 1)], tmp_path / "out"
    )

    offloading = sft_command(office, tmp_path / "out", OPTIMIZER_OFFLOAD="auto")
    result = call([*offloading, "--simulated-device-memory=1e9", "--optimizer-offload-auto-threshold=1e6",
                   "--optimizer-offload-streamed=0.5"])  # fmt: skip
    assert result.returncode == 0, result.stderr
    first, *_, last = records = training_records(tmp_path / "out")
    fractions = [record["offload_fraction"] for record in records]
    assert "speculation_failure_rate" not in first and 0 <= last["speculation_failure_rate"] <= 1
    assert (fractions[0], max(fractions), fractions[-1]) == (0.0, 1.0, 0.0)
    assert "before, auto from here on" in result.stderr
    assert "to the device" in result.stderr
    assert losses(tmp_path / "out") == losses(unbroken)
    assert_same_weights(tmp_path / "out" / "hf", unbroken / "hf")


@pytest.mark.long
def test_killed_worker_is_replaced_and_the_run_ends_with_the_bits_of_an_undisturbed_one(
    office: Office, unbroken: Path, tmp_path: Path
) -> None:
    """Killed at a random step, before or after the first checkpoint. Only the launcher restarts it."""
    victim, step = random.choice("01"), random.randrange(1, NUM_STEPS // 2)
    output = tmp_path / "out"
    arguments = [*sft_command(office, output, SAVE_INTERVAL=10), "--max-restarts=1"]
    launcher = start(arguments, environment())
    await_steps(output, step, launcher)
    os.kill(worker_of(launcher.pid, victim), signal.SIGKILL)
    _, messages = launcher.communicate(timeout=120)
    what = f"rank {victim} killed at step {step}: {messages}"
    assert launcher.returncode == 0, what
    assert f"local rank {victim} ended: killed by SIGKILL" in messages, what
    assert messages.count("restart 1 of 1") == 1 and "Traceback" not in messages, what
    assert losses(output) == losses(unbroken), what
    assert_same_weights(output / "hf", unbroken / "hf")


@pytest.mark.long
def test_length_that_was_trained_already_leaves_the_run_as_it_was(
    office: Office, unbroken: Path, tmp_path: Path
) -> None:
    shutil.copytree(unbroken, tmp_path / "out")
    before = (tmp_path / "out" / "config.yaml").read_bytes()
    result = call_workers(2, sft_command(office, tmp_path / "out", TRAIN_TOKENS_OR_ITERS="20", LR="1e-3"))
    assert result.returncode == 0, result.stderr
    assert "nothing is left to train of 20 steps, 40 are done" in result.stderr
    assert (tmp_path / "out" / "config.yaml").read_bytes() == before


@pytest.mark.long
def test_packed_run_goes_on_after_a_resume_as_if_it_had_never_stopped(office: Office, tmp_path: Path) -> None:
    """With packs of 96 tokens, each with two to four of the office's questions."""
    output = tmp_path / "out"
    sizes = {"SEQ_LEN": 96, "PAD_LEN": 96, "SAVE_INTERVAL": 5, "TRAIN_TOKENS_OR_ITERS": 10}
    arguments = [*sft_command(office, output, GLOBAL_BATCH_SIZE=8, **sizes)]
    straight = call_workers(1, arguments, MP_SFT_PACKING="true")
    assert straight.returncode == 0, straight.stderr
    assert "400 conversations in " in straight.stderr and "% padding (unpacked " in straight.stderr
    expected = losses(output)
    assert expected[-1] < expected[0]
    hf = shutil.move(output / "hf", tmp_path / "hf")
    cut_back(output, 5)
    resumed = call_workers(1, arguments, MP_SFT_PACKING="true")
    assert resumed.returncode == 0 and "resumed after step 5" in resumed.stderr, resumed.stderr
    assert losses(output) == expected
    assert_same_weights(output / "hf", hf)
    assert 10 in validation_losses(output)


ANSWERS = [{"instruction": f"{n} plus 1?", "chosen": f"{n + 1}.", "rejected": "No"} for n in range(24)]
LABELLED = [
    {"prompt": f"{n // 2} plus 1?", "completion": "No" if n % 2 else f"{n // 2 + 1}.", "label": n % 2 == 0}
    for n in range(48)
]


def preference_line(office: Office, folder: Path, objective: str, **changes: object) -> list[str]:
    (rows := folder / "rows.json").write_text(json.dumps(LABELLED if objective == "kto" else ANSWERS))
    changes |= {"GLOBAL_BATCH_SIZE": 4, "TRAIN_TOKENS_OR_ITERS": 6, "LR": "1e-3"}
    paths = {"DATASET_PATH": rows, "VALID_DATASET_PATH": rows}
    line = command(**office.positions(folder / "run") | paths | changes)
    return [*line, "--objective", objective, "--packing", "--dpo-beta", "0.5"]


def test_preferences_are_learned_from_the_first_weights_on(office: Office, tmp_path: Path) -> None:
    result = call_workers(2, preference_line(office, tmp_path, "dpo"))
    assert result.returncode == 0, result.stderr
    first, *_, last = training_records(tmp_path / "run")
    assert first["loss"] == pytest.approx(math.log(2)) and first["rewards/margins"] == 0
    assert last["rewards/margins"] > 0.1 and last["loss"] < 0.6
    evaluated = json.loads((tmp_path / "run/log/metrics.jsonl").read_text().splitlines()[-1])
    assert evaluated["valid_pairs"] == 24 and evaluated["valid_margin"] > 0 and "valid_accuracy" in evaluated


@pytest.mark.long
@pytest.mark.parametrize("objective", ["dpo", "orpo", "simpo", "kto"])
def test_killed_preferences_go_on_to_the_bit(office: Office, tmp_path: Path, objective: str) -> None:
    line = [*preference_line(office, tmp_path, objective, SAVE_INTERVAL=2), "--export-hf"]
    output = tmp_path / "run"
    straight = call_workers(2, line)
    assert straight.returncode == 0, straight.stderr
    expected, hf = training_records(output), shutil.move(output / "hf", tmp_path / "hf")
    assert expected[-1]["rewards/margins"] > expected[0]["rewards/margins"]
    shutil.rmtree(output)
    launcher = start([*line, "--max-restarts=1"], environment())
    await_steps(output, 3, launcher)
    os.kill(worker_of(launcher.pid, "1"), signal.SIGKILL)
    _, messages = launcher.communicate(timeout=120)
    assert launcher.returncode == 0 and messages.count("restart 1 of 1") == 1, messages
    names = [name for name in expected[0] if name.startswith(("loss", "rewards", "logps", "kl", "nll"))]
    found = [[record[name] for name in names] for record in training_records(output)]
    assert found == [[record[name] for name in names] for record in expected]
    assert_same_weights(output / "hf", hf)
