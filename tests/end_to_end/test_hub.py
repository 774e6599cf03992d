"""A run whose model, tokenizer and data are hub names, from a cache without a network."""

from pathlib import Path

import pytest
import yaml
from end_to_end.conftest import Office
from end_to_end.shell import call, call_workers, command, losses
from fake_hub import serving
from hub_cache import REVISION, add_to_cache, files_in
from huggingface_hub import constants

from toolkits.convert import main as convert

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def cache(office: Office, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and a data set with two splits, whose training split has two files."""
    cache = tmp_path_factory.mktemp("cache")
    add_to_cache(cache, "acme/office-1B", files_in(office.model))
    rows = office.train.read_bytes().splitlines(keepends=True)
    shards = {
        "data/train-00000-of-00002.jsonl": b"".join(rows[:100]),
        "data/train-00001-of-00002.jsonl": b"".join(rows[100:]),
        "data/test-00000-of-00001.json": office.valid.read_bytes(),
        "dataset_infos.json": b"{}",
        "README.md": b"# Office",
    }
    add_to_cache(cache, "acme/letters", shards, kind="dataset")
    return cache


def test_a_name_is_converted(
    office: Office,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    assert convert(["hf2mcore", "--load", "acme/office-1B", "--save", str(tmp_path / "mcore")]) == 0
    assert convert(["mcore2hf", "--load", str(tmp_path / "mcore"), "--save", str(tmp_path / "hf")]) == 0
    for name in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (office.model / name).read_bytes()
    assert convert(["hf2mcore", "--load", "acme/none", "--save", str(tmp_path / "none")]) == 4
    assert "ERROR acme/none is neither a path nor in" in capsys.readouterr().err


def test_names_give_the_run_of_the_same_files(office: Office, cache: Path, tmp_path: Path) -> None:
    """Bit for bit. The run resumes at its revision, although the cache has a newer one by then."""
    variables = {"HF_HUB_CACHE": cache, "HF_HUB_OFFLINE": 1, "NPROC_PER_NODE": 1}
    steps = {"TRAIN_TOKENS_OR_ITERS": 4, "SAVE_INTERVAL": 4, "BATCH_SIZE": 4}
    named = {
        **office.positions(tmp_path / "named"),
        "PRETRAIN_CHECKPOINT_PATH": "acme/office-1B",
        "DATASET_PATH": "acme/letters",
        "VALID_DATASET_PATH": "acme/letters",
    }
    result = call([*command(**steps, **named), "--export-hf"], **variables)
    assert result.returncode == 0, result.stderr
    local = call_workers(1, [*command(**steps, **office.positions(tmp_path / "local")), "--export-hf"])
    assert local.returncode == 0, local.stderr
    assert losses(tmp_path / "named") == losses(tmp_path / "local")
    assert files_in(tmp_path / "named" / "hf") == files_in(tmp_path / "local" / "hf")

    model = cache / "models--acme--office-1B" / "snapshots" / REVISION
    data = cache / "datasets--acme--letters" / "snapshots" / REVISION / "data"
    resolved = yaml.safe_load((tmp_path / "named" / "config.yaml").read_text())
    assert resolved["checkpoint"]["load"] == str(model)
    assert resolved["data"]["train_data_path"] == f"{data}/train*"
    assert resolved["data"]["valid_data_path"] == f"{data}/test-00000-of-00001.json"

    newer = {**files_in(model), "tokenizer.json": b"{}"}
    add_to_cache(cache, "acme/office-1B", newer, revision="f" * 40)
    resumed = call([*command(**{**steps, "TRAIN_TOKENS_OR_ITERS": 6}, **named), "--export-hf"], **variables)
    assert resumed.returncode == 0, resumed.stderr
    assert len(losses(tmp_path / "named")) == 6


def test_a_run_is_pushed_and_reported_and_its_losses_stay(office: Office, tmp_path: Path) -> None:
    """One service accepts all records; the other ends its process at the first record."""
    taken = f"print(metrics.get('loss'), file=open({str(tmp_path / 'taken')!r}, 'a'))"
    for name, body in (("trackio", taken), ("wandb", "import os; os._exit(3)")):
        lines = ["import sys", "init = lambda *_, **__: sys.modules[__name__]", "finish = lambda: None"]
        lines += ["def log(metrics, step):", f"    {body}"]
        (tmp_path / f"{name}.py").write_text("\n".join(lines))
    steps = {"TRAIN_TOKENS_OR_ITERS": 4, "SAVE_INTERVAL": 4, "BATCH_SIZE": 4}
    flags = ["--export-hf", "--push-to-hub", "acme/mine", "--report-to", "trackio,wandb"]
    variables = {"HF_HUB_OFFLINE": 0, "HF_TOKEN": "some", "PYTHONPATH": tmp_path, "NPROC_PER_NODE": 1}
    with serving({}) as hub:
        run = [*command(**steps, **office.positions(tmp_path / "run")), *flags]
        result = call(run, HF_ENDPOINT=hub.url, **variables)
        assert result.returncode == 0, result.stderr
        assert hub.repositories["models/acme/mine"] == files_in(tmp_path / "run" / "hf")
    ended = "it ended with exit code 3; training is not affected, and the same command sends the rest"
    assert f"wandb: {ended}" in result.stderr and f"pushed to {hub.url}/acme/mine" in result.stderr
    assert "trackio: everything was sent" in result.stderr
    plain = call_workers(1, command(**steps, **office.positions(tmp_path / "plain")))
    assert plain.returncode == 0, plain.stderr
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")
    sent = (tmp_path / "taken").read_text().split()
    assert [float(loss) for loss in sent if loss != "None"] == losses(tmp_path / "run")
