"""The target folder appears whole or stays as it was."""

import os
import threading
import time
from pathlib import Path

import pytest

from patch.convert.target_folder import publish, staging, writing
from patch.errors import ConversionError


def _target(folder, marker="old"):
    folder.mkdir()
    (folder / "config.json").write_text(marker)
    return folder


def enter(target: Path, sources: list[Path], *, overwrite: bool) -> None:
    with staging(target, sources, overwrite=overwrite):
        pass


def test_only_a_model_is_replaced_and_only_where_that_was_asked_for(tmp_path):
    target, precious = _target(tmp_path / "hf"), tmp_path / "home"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    with pytest.raises(ConversionError, match="no Hugging Face model"):
        enter(precious, [], overwrite=True)
    assert (precious / "thesis.txt").read_text() == "years of work"
    with pytest.raises(ConversionError, match="hf holds a Hugging Face model already.*--overwrite"):
        enter(target, [], overwrite=False)
    assert not (tmp_path / ".hf.partial").exists()
    enter(target, [], overwrite=True)


def test_target_that_is_or_holds_a_source_is_refused(tmp_path):
    target = _target(tmp_path / "hf")
    source = _target(target / "source")
    with pytest.raises(ConversionError, match="weights came from"):
        enter(target, [tmp_path / "." / "hf"], overwrite=True)
    with pytest.raises(ConversionError, match=f"holds {source}, the weights came from"):
        enter(target, [tmp_path / "other", source], overwrite=True)
    enter(source / "new", [target, source], overwrite=True)


def test_mount_point_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ConversionError, match="/proc is a mount point.*give a folder in it"):
        enter(Path("/proc"), [], overwrite=True)
    assert not any(tmp_path.iterdir())


def test_leftovers_of_an_interrupted_export_are_cleared(tmp_path):
    partial = _target(tmp_path / ".hf.partial", "half-written")
    with staging(tmp_path / "hf", [], overwrite=False) as found:
        assert found == partial and not any(partial.iterdir())
    assert not any(tmp_path.iterdir())


def test_second_conversion_to_a_target_is_told_who_writes_it(tmp_path, monkeypatch):
    monkeypatch.setattr("patch.storage.lock._WAIT_S", 0.1)
    with staging(tmp_path / "hf", [], overwrite=False) as partial:
        (partial / "half").touch()
        said = rf"hf is being written by process {os.getpid()} on .*--save"
        with pytest.raises(ConversionError, match=said):
            enter(tmp_path / "hf", [], overwrite=True)
        assert (partial / "half").exists()


def test_target_that_another_conversion_made_in_the_meantime_is_not_replaced(tmp_path):
    target, held = tmp_path / "hf", threading.Event()

    def convert() -> None:
        with staging(target, [], overwrite=False) as partial:
            held.set()
            time.sleep(0.3)
            (partial / "config.json").write_text("theirs")
            publish(target, "checkpoint")

    other = threading.Thread(target=convert)
    other.start()
    held.wait()
    with pytest.raises(ConversionError, match="hf holds a Hugging Face model already"):
        enter(target, [], overwrite=False)
    other.join()
    assert (target / "config.json").read_text() == "theirs"


def test_target_is_replaced_when_all_bytes_are_on_the_disk(tmp_path, monkeypatch):
    target, partial = _target(tmp_path / "hf"), _target(tmp_path / ".hf.partial", "new")
    _target(tmp_path / ".hf.replaced")  # left by a process that was killed
    (partial / "below").mkdir()
    (partial / "below" / "new").touch()
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")))
    publish(target, "checkpoint")
    assert (target / "config.json").read_text() == "new" and os.listdir(tmp_path) == ["hf"]
    assert {f"{partial}/{name}" for name in ("config.json", "below", "below/new")} <= set(synced)


def test_publishing_what_is_gone_leaves_the_target(tmp_path):
    target = _target(tmp_path / "hf")
    with pytest.raises(ConversionError, match="cannot put"):
        publish(target, "checkpoint")
    assert (target / "config.json").read_text() == "old" and os.listdir(tmp_path) == ["hf"]


def test_full_disk_is_told_whichever_library_meets_it(tmp_path, tiny_tokenizer):
    (tmp_path / "tokenizer.json").mkdir()  # `tokenizers` raises plain Exception when it cannot write
    with pytest.raises(ConversionError, match="cannot write"), writing(tmp_path):
        tiny_tokenizer().save_pretrained(tmp_path)


def test_bug_while_writing_is_not_called_a_full_disk(tmp_path):
    with pytest.raises(KeyError), writing(tmp_path):
        {}["missing"]
