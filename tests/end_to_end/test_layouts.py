"""bf16 with TP, interleaved PP and DP: other layouts take the run's checkpoints.

unit/training/test_covered_layouts.py and test_any_layout.py show that each layout trains as one process does,
and resumes from each other one bit for bit.
"""

import shutil
from pathlib import Path

import pytest
import torch
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
# The same bf16 weights in two layouts, whose sums are rounded in different orders.
LAYOUT_TOLERANCE = 0.02


@pytest.fixture(scope="module")
def few_rows(office: Office, tmp_path_factory: pytest.TempPathFactory) -> Office:
    """One step's rows, so that every step learns the same ones. Four layers, for interleaving."""
    folder = tmp_path_factory.mktemp("few")
    rows = office.train.read_text().splitlines(keepends=True)[:GLOBAL_BATCH]
    (folder / "few.jsonl").write_text("".join(rows))
    shutil.copytree(office.model, folder / "model")
    torch.manual_seed(7)
    config = AutoConfig.from_pretrained(office.model, num_hidden_layers=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    return office._replace(train=folder / "few.jsonl", model=folder / "model")


def command_of(few_rows: Office, output: Path, **changes: object) -> list[str]:
    steps = {"PR": "bf16", "SAVE_INTERVAL": 2, "TRAIN_TOKENS_OR_ITERS": STEPS, "WARMUP_TOKENS_OR_ITERS": 1}
    paths = {**few_rows.positions(output), "VALID_DATASET_PATH": "none"}
    return command(**{**paths, **steps, **changes})


@pytest.fixture(scope="module")
def four_ranks(few_rows: Office, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interleaved stages of two ranks each, with activation offload."""
    output = tmp_path_factory.mktemp("four") / "out"
    arguments = [*command_of(few_rows, output, TP=2, PP=2, AC="offload"), "--export-hf"]
    result = call_workers(4, arguments, MP_VP=1)
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr, result.stderr
    assert result.stderr.count(f"{output / 'hf'}") == 1, "the export is told once"
    return output


def test_one_checkpoint_of_stages_converts_to_what_they_exported(four_ranks: Path, tmp_path: Path) -> None:
    offloaded = [record["activation_offload_gib"] for record in training_records(four_ranks)]
    assert len(offloaded) == STEPS and min(offloaded) > 0
    assert losses(four_ranks)[-1] < losses(four_ranks)[0] - 0.5
    load = four_ranks / "checkpoint" / f"iter_{STEPS:07d}"
    assert convert(["mcore2hf", f"--load={load}", f"--save={tmp_path / 'hf'}"]) == 0
    assert_same_weights(tmp_path / "hf", four_ranks / "hf")


def test_run_goes_on_at_another_layout_where_the_user_says_so(
    few_rows: Office, four_ranks: Path, tmp_path: Path
) -> None:
    """It does not begin anew even if its checkpoints are damaged."""
    output = shutil.copytree(four_ranks, tmp_path / "out", symlinks=True)
    cut_back(output, 2)
    arguments = [*command_of(few_rows, output, DO="true"), "--overlapped-distributed-optimizer"]
    result = call(arguments, NPROC_PER_NODE=2)  # through the launcher
    assert result.returncode == 0, result.stderr
    assert "(position 10 TP): 2 before, 1 from here on" in result.stderr
    assert "saved at TP 2, PP 2" in result.stderr and "seeded anew" in result.stderr
    assert losses(output) == pytest.approx(losses(four_ranks), abs=LAYOUT_TOLERANCE)
    before = (output / "log" / "metrics.jsonl").read_bytes()
    for index in (output / "checkpoint").glob("iter_*/.metadata"):
        index.unlink()
    result = call_workers(2, arguments)
    assert result.returncode == 4 and "Traceback" not in result.stderr, result.stderr
    assert "is whole: " in result.stderr and "/.metadata is missing" in result.stderr
    assert (output / "log" / "metrics.jsonl").read_bytes() == before


def test_checkpoint_at_position_22_gives_its_weights_to_another_layout(
    few_rows: Office, four_ranks: Path, tmp_path: Path
) -> None:
    """The checkpoint has no config.json. The export writes one, with the tokenizer of TOKENIZER_PATH."""
    source = shutil.copytree(four_ranks, tmp_path / "source", symlinks=True)
    output = tmp_path / "out"
    cut_back(source, STEPS - 1)
    positions = {"DO": "true", "PRETRAIN_CHECKPOINT_PATH": source, "TRAIN_TOKENS_OR_ITERS": 2}
    arguments = [*command_of(few_rows, output, **positions), "--overlapped-distributed-optimizer"]
    result = call_workers(2, [*arguments, "--export-hf"], TOKENIZER_PATH=few_rows.model)
    assert result.returncode == 0, result.stderr
    assert losses(output)[0] == pytest.approx(losses(four_ranks)[STEPS - 1], abs=LAYOUT_TOLERANCE)
    assert convert(["mcore2hf", f"--load={output}", f"--save={tmp_path / 'hf'}"]) == 0
    assert_same_weights(tmp_path / "hf", output / "hf")
    for path in (output / "hf").glob("*.json"):
        assert path.read_bytes() == (tmp_path / "hf" / path.name).read_bytes(), path.name
