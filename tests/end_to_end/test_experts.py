"""Small Qwen 2 MoE through the shell: expert parallelism, kill, resume, export, another layout."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from end_to_end.conftest import Office
from end_to_end.shell import (
    assert_same_weights,
    await_file,
    call,
    call_workers,
    command,
    environment,
    loss_in_transformers,
    losses,
    start,
    training_records,
    worker_of,
)
from transformers import AutoModelForCausalLM, Qwen2MoeConfig

from patch.storage.names import TRACKER
from toolkits.convert import main as convert

pytestmark = pytest.mark.long

STEPS = 12
LOSS_TOLERANCE = 1e-4
"""Float32 sums in different orders, between two layouts or two frameworks."""


@pytest.fixture(scope="module")
def mixture(office: Office, tmp_path_factory: pytest.TempPathFactory) -> Office:
    """The small model's tokenizer with random experts. The first layer has none."""
    folder = shutil.copytree(office.model, tmp_path_factory.mktemp("mixture") / "model")
    torch.manual_seed(7)
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    config = Qwen2MoeConfig(
        vocab_size=vocab_size, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=48, shared_expert_intermediate_size=80, mlp_only_layers=[0],
        max_position_embeddings=128,
    )  # fmt: skip
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return office._replace(model=folder)


def arguments(mixture: Office, output: Path, **changes: object) -> list[str]:
    steps = {"SAVE_INTERVAL": 2, "TRAIN_TOKENS_OR_ITERS": STEPS, "WARMUP_TOKENS_OR_ITERS": 1, "DO": "true"}
    flags = ["--moe-aux-loss-coeff=0.01", "--moe-z-loss-coeff=1e-3", "--overlapped-distributed-optimizer"]
    return [*command(**{**mixture.positions(output), **steps, **changes}), *flags, "--export-hf"]


@pytest.fixture(scope="module")
def unbroken(mixture: Office, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "unbroken"
    result = call(arguments(mixture, output), MP_EP=2)
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr, result.stderr
    return output


def test_loads_and_losses_of_layers_are_written_and_the_loss_falls(unbroken: Path) -> None:
    assert losses(unbroken)[-1] < losses(unbroken)[0] - 0.5
    for record in training_records(unbroken):
        names = ("expert_load_max", "expert_load_min", "expert_dropped", "aux_loss", "z_loss")
        assert {key for key in record if "/" in key} == {f"{name}/{n}" for name in names for n in (2, 3)}


def test_validation_loss_is_that_of_the_export_in_transformers(mixture: Office, unbroken: Path) -> None:
    assert json.loads((unbroken / "hf" / "config.json").read_text())["model_type"] == "qwen2_moe"
    lines = map(json.loads, (unbroken / "log" / "metrics.jsonl").read_text().splitlines())
    *_, valid_loss = (line["valid_loss"] for line in lines if "valid_loss" in line)
    expected = loss_in_transformers(unbroken / "hf", mixture.held_out)
    assert valid_loss == pytest.approx(expected, abs=LOSS_TOLERANCE)


def test_run_that_is_killed_goes_on_with_the_same_bits_and_at_another_layout_within_the_bound(
    mixture: Office, unbroken: Path, tmp_path: Path
) -> None:
    broken, other = tmp_path / "broken", tmp_path / "other"
    launcher = start(arguments(mixture, broken), environment(MP_EP=2))
    await_file(broken / "checkpoint" / TRACKER, launcher)
    os.kill(worker_of(launcher.pid, "1"), signal.SIGKILL)
    _, messages = launcher.communicate(timeout=120)
    assert launcher.returncode != 0 and "local rank 1 ended: killed by SIGKILL" in messages, messages
    shutil.copytree(broken, other, symlinks=True)
    resumed = call_workers(2, arguments(mixture, broken), MP_EP=2)
    assert resumed.returncode == 0 and "resumed after step" in resumed.stderr, resumed.stderr
    assert losses(broken) == losses(unbroken)
    assert_same_weights(broken / "hf", unbroken / "hf")
    layout = {"TP": 2, "SP": "true", "PP": 2}
    etp = "--expert-tensor-parallel-size=1"
    result = call_workers(4, [*arguments(mixture, other, **layout), etp], MP_EP=2)
    assert result.returncode == 0 and "resumed after step" in result.stderr, result.stderr
    assert losses(other) == pytest.approx(losses(unbroken), abs=LOSS_TOLERANCE)
    load = other / "checkpoint" / f"iter_{STEPS:07d}"
    assert convert(["mcore2hf", f"--load={load}", f"--save={tmp_path / 'hf'}"]) == 0
    assert_same_weights(tmp_path / "hf", other / "hf")
