"""The target folder appears whole or stays as it was."""

import os
import shutil
from pathlib import Path

import pytest
from distributed_runner import run_distributed
from small_runs import hf_llama, small_run
from transformers import LlamaForCausalLM

from patch.convert.folder import prepare, publish, writing
from patch.errors import ConversionError


def _target(folder, marker="old"):
    folder.mkdir()
    (folder / "config.json").write_text(marker)
    return folder


def _contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_target_that_is_no_model_is_not_replaced(tmp_path):
    precious = tmp_path / "home"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    with pytest.raises(ConversionError, match="no Hugging Face model"):
        prepare(tmp_path / ".home.partial", precious, None)
    assert (precious / "thesis.txt").read_text() == "years of work"


def test_target_that_is_the_source_is_refused(tmp_path):
    target = _target(tmp_path / "hf")
    with pytest.raises(ConversionError, match="weights came from"):
        prepare(tmp_path / ".hf.partial", target, tmp_path / "." / "hf")


def test_leftovers_of_an_interrupted_export_are_cleared(tmp_path):
    partial = _target(tmp_path / ".hf.partial", "half-written")
    prepare(partial, tmp_path / "hf", None)
    assert not any(partial.iterdir())


def test_publishing_replaces_the_target_and_leaves_nothing_else(tmp_path):
    target, partial = _target(tmp_path / "hf"), _target(tmp_path / ".hf.partial", "new")
    publish(partial, target)
    assert (target / "config.json").read_text() == "new"
    assert os.listdir(tmp_path) == ["hf"]


def test_publishing_what_is_gone_brings_the_target_back(tmp_path):
    target = _target(tmp_path / "hf")
    with pytest.raises(ConversionError, match="cannot put"):
        publish(tmp_path / ".hf.partial", target)
    assert (target / "config.json").read_text() == "old"
    assert os.listdir(tmp_path) == ["hf"]


def test_full_disk_is_told_whichever_library_meets_it(tmp_path, tiny_tokenizer):
    (tmp_path / "tokenizer.json").mkdir()  # `tokenizers` raises plain Exception when it cannot write
    with pytest.raises(ConversionError, match="cannot write"), writing(tmp_path):
        tiny_tokenizer().save_pretrained(tmp_path)


def test_bug_while_writing_is_not_called_a_full_disk(tmp_path):
    with pytest.raises(KeyError), writing(tmp_path):
        {}["missing"]


def _fill_the_disk_of(rank: int) -> None:
    """From now on a file of this process ends at 20 kB, as on a full disk."""
    import resource
    import signal

    if rank == int(os.environ["RANK"]):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def _failing_export(rank, world_size, folder: Path, tokenizer):
    import torch

    from patch import compat
    from patch.convert import export_hf
    from patch.device import DeviceContext
    from patch.distributed.groups import initialize
    from patch.model import build_llama_model

    compat.apply(cuda=False)
    config = small_run(pp=2)
    groups = initialize(config, DeviceContext(torch.device("cpu"), "gloo"))
    model = build_llama_model(config, groups, torch.device("cpu"))
    _fill_the_disk_of(1)
    with pytest.raises(ConversionError) as caught:
        export_hf(model, folder, config, groups, hf_source=None, tokenizer=tokenizer, file_bytes=50_000)
    return str(caught.value)


def test_full_disk_on_one_rank_fails_on_all_and_keeps_the_target(tmp_path, tiny_tokenizer):
    hf_llama(small_run(), tmp_path / "hf")
    before = _contents(tmp_path / "hf")
    own, other = reversed(run_distributed(_failing_export, 2, tmp_path / "hf", tiny_tokenizer()))
    assert "cannot write" in own and ".safetensors" in own and "File too large" in own
    assert other == f"rank 1: {own}"
    assert os.listdir(tmp_path) == ["hf"] and _contents(tmp_path / "hf") == before
    LlamaForCausalLM.from_pretrained(shutil.copytree(tmp_path / "hf", tmp_path / "copy"))
