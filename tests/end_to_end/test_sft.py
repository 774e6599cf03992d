"""Fine-tuning through the shell over two processes: files, export, SIGTERM, resume."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from end_to_end.conftest import Office
from end_to_end.shell import call, command, environment, losses, training_records

from toolkits.quickstart.exam import answer
from toolkits.quickstart.tasks import make_examples

NUM_STEPS = 80
STEP_KEYS = (
    "iteration consumed_samples consumed_tokens loss grad_norm lr step_time_ms tokens_per_s_per_gpu tflops_per_gpu "
    "mfu peak_memory_gib host_memory_gib skipped offload_fraction comm_exposed_ms"
).split()


def sft_command(office: Office, output: Path) -> list[str]:
    """Four micro-batches a step, so that a signal can find the run on its way."""
    lengths = {"GLOBAL_BATCH_SIZE": 16, "TRAIN_TOKENS_OR_ITERS": NUM_STEPS, "SAVE_INTERVAL": 50}
    flags = ["--eval-interval", "40", "--eval-iters", "1", "--export-hf"]
    return [*command(**office.positions(output), **lengths), *flags]


@pytest.fixture(scope="module")
def unbroken(office: Office, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "unbroken"
    result = call(sft_command(office, output))
    assert result.returncode == 0, result.stderr
    return output


def latest_checkpoint(output: Path) -> int:
    return int((output / "checkpoint" / "latest_checkpointed_iteration.txt").read_text())


def test_run_leaves_its_files(unbroken: Path) -> None:
    for name in ("config.yaml", "log/loss.png", "hf/config.json", "hf/tokenizer.json", "tensorboard"):
        assert (unbroken / name).exists(), name
    assert (unbroken / "checkpoint" / "latest_checkpointed_iteration.txt").read_text().strip() == str(
        NUM_STEPS
    )
    records = training_records(unbroken)
    assert [record["iteration"] for record in records] == list(range(1, NUM_STEPS + 1))
    assert sorted(records[0]) == sorted(STEP_KEYS)
    lines = map(json.loads, (unbroken / "log" / "metrics.jsonl").read_text().splitlines())
    assert [line["iteration"] for line in lines if "valid_loss" in line] == [40, 80]


def test_loss_falls_and_the_export_speaks(unbroken: Path) -> None:
    values = losses(unbroken)
    assert sum(values[-5:]) < 0.5 * sum(values[:5])
    examples, _ = make_examples(num_train=4, num_held_out=1, seed=7)
    assert all(said for _, said in answer(unbroken / "hf", examples))


def test_resume_after_sigterm_repeats_the_run(office: Office, unbroken: Path, tmp_path: Path) -> None:
    arguments = sft_command(office, tmp_path / "out")
    launcher = subprocess.Popen(arguments, env=environment(), stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "out" / "log" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
        assert launcher.poll() is None and time.monotonic() < deadline, launcher.communicate()[1]
        time.sleep(0.02)
    launcher.send_signal(signal.SIGTERM)
    _, messages = launcher.communicate(timeout=120)
    assert launcher.returncode == 143, messages
    assert 3 <= latest_checkpoint(tmp_path / "out") < NUM_STEPS

    result = call(arguments)
    assert result.returncode == 0, result.stderr
    assert losses(tmp_path / "out") == losses(unbroken)
    assert_same_weights(tmp_path / "out" / "hf", unbroken / "hf")


def assert_same_weights(ours: Path, theirs: Path) -> None:
    from transformers import AutoModelForCausalLM

    first, second = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (ours, theirs))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_another_shape_in_the_same_folder_is_refused(office: Office, unbroken: Path) -> None:
    other = {**office.positions(unbroken), "MODEL_SIZE": "tiny", "PRETRAIN_CHECKPOINT_PATH": "none"}
    result = call(command(**other, GLOBAL_BATCH_SIZE=16), TOKENIZER_PATH=office.model)
    assert result.returncode == 2
    assert "holds a run of another model shape" in result.stderr
