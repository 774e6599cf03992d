"""A run of adapters (LoRA) through the shell: PEFT's folder, the merged export, resume at another layout."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from end_to_end.conftest import Office
from end_to_end.shell import call, call_workers, command, cut_back, loss_in_transformers, losses
from transformers import AutoModelForCausalLM, AutoTokenizer

from patch.data.chat_templates import BUILT_IN
from toolkits.convert import main as convert
from toolkits.merge import main as merge

pytestmark = pytest.mark.long

STEPS = 6
FLAGS = ["--lora-rank=4", "--lora-alpha=8", "--lora-dropout=0.1", "--export-hf", "--chat-template=plain"]


def arguments(office: Office, output: Path, **changes: object) -> list[str]:
    steps = {"SAVE_INTERVAL": 3, "TRAIN_TOKENS_OR_ITERS": STEPS, "WARMUP_TOKENS_OR_ITERS": 1, "LR": "2e-2"}
    return [*command(**{**office.positions(output), **steps, "TP": 2, "SP": "true", **changes}), *FLAGS]


@pytest.fixture(scope="module")
def unbroken(office: Office, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "unbroken"
    result = call(arguments(office, output))
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr, result.stderr
    return output


def test_peft_loads_the_folder_and_its_merge_is_the_export(
    office: Office, unbroken: Path, capsys: pytest.CaptureFixture
) -> None:
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(office.model)
    merged = peft.PeftModel.from_pretrained(base, unbroken / "adapter").merge_and_unload().state_dict()
    ours = AutoModelForCausalLM.from_pretrained(unbroken / "hf").state_dict()
    assert merged.keys() == ours.keys() and all(torch.equal(merged[name], ours[name]) for name in ours)
    assert merge(["--adapter", str(unbroken), "--save", str(unbroken.with_name("merged"))]) == 0
    again = AutoModelForCausalLM.from_pretrained(unbroken.with_name("merged")).state_dict()
    assert all(torch.equal(again[name], ours[name]) for name in ours)
    for folder in (unbroken / "hf", unbroken.with_name("merged")):
        assert AutoTokenizer.from_pretrained(folder).chat_template == BUILT_IN["plain"]
    moved = shutil.copytree(unbroken, unbroken.with_name("moved"), symlinks=True)
    text = (moved / "config.yaml").read_text()
    (moved / "config.yaml").write_text(
        re.sub("tokenizer_name_or_path: .*", "tokenizer_name_or_path: /no", text)
    )
    assert merge(["--adapter", str(moved), "--save", str(moved / "merged")]) == 4
    assert "; or put the tokenizer back at /no" in capsys.readouterr().err


def test_validation_loss_is_that_of_the_export_in_transformers(office: Office, unbroken: Path) -> None:
    lines = map(json.loads, (unbroken / "log" / "metrics.jsonl").read_text().splitlines())
    *_, valid_loss = (line["valid_loss"] for line in lines if "valid_loss" in line)
    assert valid_loss == pytest.approx(loss_in_transformers(unbroken / "hf", office.held_out), abs=1e-4)
    assert losses(unbroken)[-1] < losses(unbroken)[0] - 0.2
    sizes = [file.stat().st_size for file in (unbroken / "checkpoint" / "iter_0000003").iterdir()]
    assert sum(sizes) < (office.model / "model.safetensors").stat().st_size


def test_run_goes_on_with_the_same_bits_and_is_refused_with_other_adapters_or_weights(
    office: Office, unbroken: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = losses(unbroken)
    cut_back(unbroken, 3)
    result = call_workers(2, arguments(office, unbroken))
    assert result.returncode == 0, result.stderr
    assert "resumed after step 3" in result.stderr and losses(unbroken) == before
    result = call([*arguments(office, unbroken, TRAIN_TOKENS_OR_ITERS=9), "--lora-rank=8"])
    assert result.returncode == 2 and "has a run with other adapters" in result.stderr
    other = arguments(office, unbroken, TRAIN_TOKENS_OR_ITERS=9, PRETRAIN_CHECKPOINT_PATH=unbroken / "hf")
    result = call(other)
    assert result.returncode == 4 and "belong to base weights with checksum" in result.stderr, result.stderr
    result = call(arguments(office, unbroken.with_name("x"), PRETRAIN_CHECKPOINT_PATH=unbroken))
    assert result.returncode == 2 and "checkpoints of adapters of" in result.stderr, result.stderr


def test_exits_of_a_checkpoint_agree_also_of_an_older_one(
    office: Office, unbroken: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def files(folder: Path) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in folder.iterdir()}

    run = shutil.copytree(unbroken, tmp_path / "run", symlinks=True)
    for place in (run, run / "checkpoint" / "iter_0000003"):
        target = tmp_path / f"of {place.name}"
        assert convert(["mcore2hf", "--load", str(place), "--save", str(target)]) == 0
        converted = files(target)
        assert merge(["--adapter", str(place), "--save", str(target), "--overwrite"]) == 0
        assert files(target) == converted
        assert f"written: {target} (step {6 if place == run else 3})" in capfd.readouterr().err
    assert files(run / "hf") == files(tmp_path / "of run")
    (run / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("3\n")
    result = call(arguments(office, run, TRAIN_TOKENS_OR_ITERS=3))
    assert result.returncode == 0 and "hf (step 3)" in result.stderr, result.stderr
    adapter = ["--base", str(office.model), "--adapter", str(run / "adapter")]
    assert merge([*adapter, "--save", str(tmp_path / "merged")]) == 0
    assert files(run / "hf") == converted == files(tmp_path / "merged")


def test_export_of_a_base_in_4_bits_has_the_loss_of_the_run(office: Office, tmp_path: Path) -> None:
    line = arguments(office, tmp_path, TP=1, PP=2, SP="false", SAVE_INTERVAL=STEPS)
    result = call_workers(2, [*line, "--quantize-base=nf4-double"])
    assert result.returncode == 0, result.stderr
    last = json.loads((tmp_path / "log" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["valid_loss"] == pytest.approx(
        loss_in_transformers(tmp_path / "hf", office.held_out), abs=1e-4
    )


@pytest.mark.parametrize("place", ["adapter", "checkpoint/last"])
def test_run_that_starts_from_adapters_and_learns_nothing_writes_them_again(
    office: Office, unbroken: Path, tmp_path: Path, place: str
) -> None:
    steps = {"TRAIN_TOKENS_OR_ITERS": 1, "WARMUP_TOKENS_OR_ITERS": 0, "LR": "1e-30", "MIN_LR": "0"}
    other = command(**{**office.positions(tmp_path / "other"), **steps, "PP": 2})
    begin = shutil.copytree(unbroken, tmp_path / "begin", symlinks=True)
    other.append(f"--lora-load={begin / place}")
    result = call_workers(2, other)
    assert result.returncode == 0, result.stderr
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        ours, theirs = (folder / "adapter" / name for folder in (tmp_path / "other", unbroken))
        assert ours.read_bytes() == theirs.read_bytes()
    shutil.rmtree(begin)
    result = call_workers(2, other)
    assert result.returncode == 0 and "resumed after step 1" in result.stderr, result.stderr
    result = call([*other, "--lora-alpha=3"])
    assert result.returncode == 2 and "--lora-alpha: got 3.0, expected 8" in result.stderr, result.stderr
