"""bf16 over tensor, (interleaved) pipeline and data parallelism: each resumed run repeats itself to the bit.

The second run starts from a checkpoint of the first, so the tests of this file build on one another.
"""

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml
from end_to_end.conftest import Office
from end_to_end.shell import (
    assert_same_weights,
    call,
    call_workers,
    command,
    cut_back,
    losses,
    training_records,
)
from transformers import AutoConfig, AutoModelForCausalLM

from toolkits.convert import main as convert

pytestmark = pytest.mark.long

GLOBAL_BATCH, STEPS = 8, 5
# The same bf16 weights in two layouts: sums are rounded in another order.
LAYOUT_TOLERANCE = 0.02


class Finished(NamedTuple):
    """A run that went to its end twice: at once, and resumed after step 2."""

    arguments: list[str]
    output: Path
    first: list[float]
    resumed: list[float]
    messages: str


def run_twice(
    num_ranks: int,
    arguments: list[str],
    output: Path,
    first: dict[str, object] | None = None,
    **variables: object,
) -> Finished:
    """Run, forget what came after step 2, run again; the first export and config.yaml are kept as *_first.

    `first` holds variables of the first run alone.
    """
    once = call_workers(num_ranks, arguments, **{**variables, **(first or {})})
    assert once.returncode == 0, once.stderr
    losses_at_once = losses(output)
    (output / "hf").rename(output / "hf_first")
    shutil.copy(output / "config.yaml", output / "config_first.yaml")
    cut_back(output, 2)
    again = call_workers(num_ranks, arguments, **variables)
    assert again.returncode == 0, again.stderr
    assert "resumed after step 2" in again.stderr
    return Finished(arguments, output, losses_at_once, losses(output), once.stderr + again.stderr)


@pytest.fixture(scope="module")
def few_rows(office: Office, tmp_path_factory: pytest.TempPathFactory) -> Office:
    """As many rows as one step takes: every step learns from the same ones. Four layers, to interleave."""
    folder = tmp_path_factory.mktemp("few")
    rows = office.train.read_text().splitlines(keepends=True)[:GLOBAL_BATCH]
    (folder / "few.jsonl").write_text("".join(rows))
    shutil.copytree(office.model, folder / "model")
    torch.manual_seed(office.seed)
    config = AutoConfig.from_pretrained(office.model, num_hidden_layers=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    return office._replace(train=folder / "few.jsonl", model=folder / "model")


def command_of(few_rows: Office, output: Path, **changes: object) -> list[str]:
    steps = {"PR": "bf16", "SAVE_INTERVAL": 2, "TRAIN_TOKENS_OR_ITERS": STEPS, "WARMUP_TOKENS_OR_ITERS": 1}
    paths = {**few_rows.positions(output), "VALID_DATASET_PATH": "none"}
    return [*command(**{**paths, **steps, **changes}), "--export-hf"]


@pytest.fixture(scope="module")
def four_ranks(few_rows: Office, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """At once with interleaved stages, resumed without; activations are offloaded."""
    output = tmp_path_factory.mktemp("four") / "out"
    arguments = command_of(few_rows, output, TP=2, PP=2, AC="offload")
    return run_twice(4, arguments, output, first={"MP_VP": 1})


@pytest.fixture(scope="module")
def sharded(few_rows: Office, four_ranks: Finished, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Two replicas that share gradients and states, from the first run's weights after step 4."""
    output = tmp_path_factory.mktemp("sharded") / "out"
    cut_back(four_ranks.output, STEPS - 1)
    positions = {"DO": "true", "PRETRAIN_CHECKPOINT_PATH": four_ranks.output}
    arguments = [*command_of(few_rows, output, **positions), "--overlapped-distributed-optimizer"]
    return run_twice(2, arguments, output, TOKENIZER_PATH=few_rows.model)


def test_tp_times_pp_resumes_to_the_bit_without_interleaving(four_ranks: Finished) -> None:
    files = [four_ranks.output / name for name in ("config_first.yaml", "config.yaml")]
    configs = [yaml.safe_load(file.read_text()) for file in files]
    stages = [config["parallel"]["num_layers_per_virtual_pipeline_stage"] for config in configs]
    assert stages == [1, 0]
    offloaded = [record["activation_offload_gib"] for record in training_records(four_ranks.output)]
    assert len(offloaded) == STEPS and min(offloaded) > 0
    assert len(four_ranks.first) == STEPS and four_ranks.first[-1] < four_ranks.first[0] - 0.5
    assert four_ranks.resumed == four_ranks.first
    assert_same_weights(four_ranks.output / "hf", four_ranks.output / "hf_first")


def test_one_checkpoint_of_stages_converts_to_what_they_exported(
    four_ranks: Finished, tmp_path: Path
) -> None:
    load = four_ranks.output / "checkpoint" / f"iter_{STEPS:07d}"
    assert convert(["mcore2hf", f"--load={load}", f"--save={tmp_path / 'hf'}"]) == 0
    assert_same_weights(tmp_path / "hf", four_ranks.output / "hf")


def test_run_that_began_with_a_checkpoint_converts_to_what_it_exported(
    sharded: Finished, tmp_path: Path
) -> None:
    """No config.json lay at its position 22: it is written anew, with the tokenizer of TOKENIZER_PATH."""
    assert convert(["mcore2hf", f"--load={sharded.output}", f"--save={tmp_path / 'hf'}"]) == 0
    assert_same_weights(tmp_path / "hf", sharded.output / "hf")
    for path in (sharded.output / "hf").glob("*.json"):
        assert path.read_bytes() == (tmp_path / "hf" / path.name).read_bytes(), path.name


def test_sharded_replicas_resume_to_the_bit(sharded: Finished) -> None:
    assert len(sharded.first) == STEPS
    assert sharded.resumed == sharded.first
    assert_same_weights(sharded.output / "hf", sharded.output / "hf_first")


def test_checkpoint_at_position_22_gives_its_weights_to_another_layout(
    four_ranks: Finished, sharded: Finished
) -> None:
    assert sharded.first[0] == pytest.approx(four_ranks.first[STEPS - 1], abs=LAYOUT_TOLERANCE)


def test_no_library_warns_the_user(four_ranks: Finished, sharded: Finished) -> None:
    for messages in (four_ranks.messages, sharded.messages):
        assert "Warning" not in messages, messages


def test_export_is_told_once(four_ranks: Finished) -> None:
    assert four_ranks.messages.count(f"{four_ranks.output / 'hf'}") == 2, "once in each of the two runs"


def test_run_goes_on_at_another_layout_and_with_another_batch_where_the_user_says_so(
    few_rows: Office, four_ranks: Finished, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    for name in ("checkpoint", "config.yaml", "data.json", "log"):
        source, target = four_ranks.output / name, output / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    cut_back(output, 2)
    arguments = [*command_of(few_rows, output, DO="true"), "--overlapped-distributed-optimizer"]
    result = call(arguments[:-2] + arguments[-1:], NPROC_PER_NODE=2)  # by the launcher
    assert result.returncode == 0, result.stderr
    assert "(position 10 TP): 2 before, 1 from here on" in result.stderr
    assert "saved at TP 2, PP 2" in result.stderr and "seeded anew" in result.stderr
    assert losses(output) == pytest.approx(four_ranks.first, abs=LAYOUT_TOLERANCE)

    cut_back(output, 4)
    larger = {"GLOBAL_BATCH_SIZE": 16, "TRAIN_TOKENS_OR_ITERS": 6}
    arguments = command_of(few_rows, output, **larger)[:-1]
    refused = call_workers(1, arguments)
    assert refused.returncode == 2 and "--resume-with-changed-data" in refused.stderr, refused.stderr
    result = call_workers(2, [*arguments, "--resume-with-changed-data"])
    assert result.returncode == 0, result.stderr
    assert "32 samples were consumed; training goes on with sample 32" in result.stderr
    consumed = [record["consumed_samples"] for record in training_records(output)]
    assert consumed == [8, 16, 24, 32, 48, 64]


def test_checkpoint_of_another_shape_is_refused(
    few_rows: Office, four_ranks: Finished, tmp_path: Path
) -> None:
    moved = shutil.copytree(four_ranks.output / "checkpoint", tmp_path / "moved")  # no config.yaml beside it
    positions = {"MODEL_SIZE": "tiny", "PRETRAIN_CHECKPOINT_PATH": moved}
    arguments = command_of(few_rows, tmp_path / "out", **positions)
    result = call_workers(1, arguments, TOKENIZER_PATH=few_rows.model)
    assert result.returncode == 4, result.stderr
    assert "has shape" in result.stderr and "MODEL_SIZE" in result.stderr
    assert "Traceback" not in result.stderr


def test_damaged_checkpoints_do_not_begin_the_run_anew(few_rows: Office, sharded: Finished) -> None:
    """The last test of this file: it damages the second run."""
    metrics = sharded.output / "log" / "metrics.jsonl"
    before = metrics.read_bytes()
    for index in (sharded.output / "checkpoint").glob("iter_*/.metadata"):
        index.unlink()
    result = call_workers(2, sharded.arguments, TOKENIZER_PATH=few_rows.model)
    assert result.returncode == 4, result.stderr
    assert (
        "is whole: " in result.stderr
        and "/.metadata is missing" in result.stderr
        and "Traceback" not in result.stderr
    )
    assert metrics.read_bytes() == before
