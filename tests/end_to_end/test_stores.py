"""Runs with checkpoints on an S3 that fails, dies, and works again, compared with a run on the disk.

The S3 is moto's server, used by s3fs over HTTP. Each test builds on the tests before it.
"""

import gc
import subprocess
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import s3_server
from end_to_end.conftest import Office
from end_to_end.shell import call_workers, command, losses
from refusals import refused
from small_runs import small_run

from patch.device import MachineFacts
from patch.errors import ConfigError
from patch.preflight.validate import store_is_there
from patch.storage.checksums import SummedFile, content
from patch.storage.remote import RemotePath
from toolkits.convert import main as convert
from toolkits.inspect_checkpoint import main as inspect

pytestmark = pytest.mark.long

STEPS = 6
FLAGS = ["--save-interval", "2", "--seed", "5"]
RECORDS = {"config.yaml": "config.yaml", "data.json": "data.json", "metrics.jsonl": "log/metrics.jsonl"}


@pytest.fixture(scope="module")
def server() -> Iterator[s3_server.Server]:
    for module, package in s3_server.NEEDED.items():
        pytest.importorskip(module, reason=f"{package} is not installed: make test installs it")
    with pytest.MonkeyPatch.context() as patched, s3_server.running() as server:
        for name, value in {**s3_server.ENVIRONMENT, "AWS_ENDPOINT_URL": server.url}.items():
            patched.setenv(name, value)
        yield server


@pytest.fixture(scope="module")
def store(server: s3_server.Server) -> fsspec.AbstractFileSystem:
    store = fsspec.filesystem("s3", use_listings_cache=False)
    store.mkdir("bucket")
    return store


def run(office: Office, output: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    positions = {**office.positions(output), "VALID_DATASET_PATH": "none", "TRAIN_TOKENS_OR_ITERS": STEPS}
    return call_workers(2, [*command(**positions), *FLAGS, *flags], **s3_server.ENVIRONMENT | environment)


@pytest.fixture(scope="module")
def undisturbed(office: Office, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("undisturbed") / "out"
    done = run(office, output)
    assert done.returncode == 0, done.stderr
    return output


def assert_same_state(store: fsspec.AbstractFileSystem, url: str, undisturbed: Path) -> None:
    folder = undisturbed / "checkpoint" / f"iter_{STEPS:07d}"
    names = [path.name for path in folder.glob("*.distcp")]
    assert len(names) == 4
    for name in names:
        assert store.cat_file(f"{url}/{folder.name}/{name}") == (folder / name).read_bytes()


def test_bucket_that_is_not_there_is_refused_before_a_process_starts(store, tmp_path) -> None:
    machine = MachineFacts(cuda_devices=0, cpu_cores=2)
    store_is_there(small_run(output_path=str(tmp_path), save="s3://bucket/run"), machine)
    with refused(ConfigError, match="--save: got s3://none/run, expected a bucket that exists"):
        store_is_there(small_run(output_path=str(tmp_path), save="s3://none/run"), machine)


def test_store_that_fails_every_tenth_request_loses_nothing(
    office, undisturbed, server, store, tmp_path
) -> None:
    """The driver tries again."""
    server.fail("every/10")
    url, output, flags = "s3://bucket/flaky", tmp_path / "out", ("--save-retain-last=2", "--no-async-save")
    done = run(office, output, "--save", url, *flags, AWS_MAX_ATTEMPTS="5")
    server.fail("none")
    assert done.returncode == 0, done.stderr
    assert losses(output) == losses(undisturbed)
    assert not (output / "checkpoint").exists()
    assert (output / "log" / "last_saved_iteration.txt").read_text() == "6\n"
    names = {path.removeprefix("bucket/flaky/") for path in store.find(url)}
    assert {name.partition("/")[0] for name in names} == {
        "iter_0000004", "iter_0000006", "latest_checkpointed_iteration.txt", *RECORDS
    }  # fmt: skip
    assert not [name for name in names if name.endswith((".unfinished", ".removed"))]
    for there, here in RECORDS.items():
        assert store.cat_file(f"{url}/{there}") == (output / here).read_bytes()
    assert_same_state(store, url, undisturbed)


def test_run_goes_on_on_another_machine_with_nothing_but_the_url(
    office, undisturbed, store, tmp_path
) -> None:
    """Its newest checkpoint is not used, because a file of it is damaged."""
    url = "s3://bucket/flaky"
    store.pipe_file(f"{url}/iter_0000006/__1_0.distcp", b"damaged")
    assert inspect([url]) == 4
    done = run(office, tmp_path / "out", "--save", url)
    assert done.returncode == 0, done.stderr
    assert (
        "DAMAGED CHECKPOINT" in done.stderr and "resumed after step 4 from s3://bucket/flaky" in done.stderr
    )
    assert losses(tmp_path / "out") == losses(undisturbed)
    assert_same_state(store, url, undisturbed)
    assert inspect([url, str(undisturbed)]) == 0
    for name, source in {"of_store": url, "of_disk": str(undisturbed)}.items():
        assert convert(["mcore2hf", "--load", source, "--save", str(tmp_path / name)]) == 0
    first, second = (tmp_path / name / "model.safetensors" for name in ("of_store", "of_disk"))
    assert first.read_bytes() == second.read_bytes()
    assert convert(["mcore2hf", "--load", "s3://none/run", "--save", str(tmp_path / "none")]) == 4
    assert inspect(["s3://none/run"]) == 4


def test_run_goes_on_from_the_checkpoint_before_a_save_in_which_the_store_died(
    office, undisturbed, server, store, tmp_path
) -> None:
    url, output = "s3://bucket/dies", tmp_path / "out"
    server.fail("after/5/distcp")  # the save of step 2 writes 4 such files
    died = run(office, output, "--save", url)
    server.fail("none")
    assert died.returncode == 4, died.stderr
    assert "s3://bucket/dies/iter_0000004 was not written" in died.stderr
    assert not store.exists(f"{url}/iter_0000004/checksums.json")
    again = run(office, output, "--save", url)
    assert again.returncode == 0, again.stderr
    assert "resumed after step 2 from s3://bucket/dies" in again.stderr
    assert losses(output) == losses(undisturbed)
    assert_same_state(store, url, undisturbed)
    assert store.exists(f"{url}/iter_0000004/checksums.json")


def test_upload_in_parts_that_is_interrupted_leaves_no_file(server, store, monkeypatch) -> None:
    monkeypatch.setattr("s3fs.S3FileSystem.default_block_size", 5 * 2**20)
    data = bytes(12 * 2**20)
    for faults, name in (("after/1/half", "half"), ("none", "whole")):
        server.fail(faults)
        path = RemotePath(f"s3://bucket/{name}")
        file = SummedFile(path)
        try:
            file.write(data)
            written = file.finish()
        except OSError as error:
            assert error.filename == "s3://bucket/half"
        finally:
            file.close()
            del file
    gc.collect()
    assert not store.exists("bucket/half") and content(path) == written


def test_second_run_in_a_store_is_refused_by_the_store_itself(server, store) -> None:
    path = RemotePath("s3://bucket/.lock")
    path.create_bytes(b"first")
    with pytest.raises(FileExistsError):
        path.create_bytes(b"second")
    assert path.read_bytes() == b"first"
