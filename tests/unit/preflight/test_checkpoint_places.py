"""What a command line with a URL means, and which are refused; stores are in fsspec's memory."""

from pathlib import Path

import pytest
from failing_store import answer, die, failing_store
from refusals import refused

from patch.config import to_yaml
from patch.errors import ConfigError
from patch.preflight.checkpoint_places import checkpoint_root, newest_saved, resumed_run_folder
from patch.preflight.model_of_folder import run_behind, shape_at
from patch.preflight.resume_guard import remember_data, resume_notes
from patch.preflight.validate import store_is_there, validate_run
from patch.storage.remote import RemotePath

FILES = (".metadata", "common.pt", "metadata.json")


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    return f"memory://{request.node.name.partition('[')[0]}"


def fill(root, iteration: int) -> None:
    folder = root / f"iter_{iteration:07d}"
    if isinstance(folder, Path):
        folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_bytes(b"")
    (root / "latest_checkpointed_iteration.txt").write_bytes(f"{iteration}".encode())


def test_store_that_does_not_answer_is_refused_before_a_process_starts(command) -> None:
    config = command.parse("--save=failing://bucket/run").config
    with failing_store():
        for error in (PermissionError("Access Denied"), ConnectionError("unreachable")):
            answer([error])
            with refused(ConfigError, match=f"--save: failing://bucket/run: .*{error}"):
                store_is_there(config, command.machine)
        store_is_there(config, command.machine)


def test_weights_in_a_store_are_found_with_the_shape_of_their_run(command, url) -> None:
    trained = command.parse("--num-layers=4").config
    fill(RemotePath(url), 7)
    load = dict(PRETRAIN_CHECKPOINT_PATH=url, MODEL_SIZE="auto")
    with refused(ConfigError, match="position 2 MODEL_SIZE.*neither a config.json nor a run's"):
        command.parse(**load)
    (RemotePath(url) / "config.yaml").write_bytes(to_yaml(trained).encode())
    for place in (url, f"{url}/iter_0000007"):
        assert run_behind(place) == trained
        config = command.parse(**load | dict(PRETRAIN_CHECKPOINT_PATH=place)).config
        assert config.model.num_layers == 4 and config.checkpoint.load == place
        validate_run(config, command.machine)
    found = shape_at(url)
    assert found is not None and str(found.file) == f"{url}/config.yaml"
    with refused(ConfigError, match="position 2 MODEL_SIZE.*got tiny, .*config.yaml has --num-layers 4"):
        validate_run(command.parse(PRETRAIN_CHECKPOINT_PATH=url).config, command.machine)


def test_hugging_face_folder_in_a_store_is_refused_by_name(command, url) -> None:
    (RemotePath(url) / "config.json").write_bytes(b"{}")
    with refused(ConfigError, match="position 22 .*a Hugging Face folder in a store: copy it to a disk"):
        validate_run(command.parse(PRETRAIN_CHECKPOINT_PATH=url).config, command.machine)


def test_guard_compares_with_what_lies_beside_the_checkpoints_in_the_store(command, url) -> None:
    """Here from another machine: OUTPUT_BASEPATH is new."""
    config = command.parse(f"--save={url}").config
    output, root = command.folder / "out", RemotePath(url)
    assert resume_notes(config) == [] and checkpoint_root(config) == root and newest_saved(config) is None
    remember_data(config, [])
    (root / "data.json").write_bytes((output / "data.json").read_bytes())
    (output / "data.json").unlink()
    fill(root, 10)
    with refused(ConfigError, match=f"{url}/config.yaml is missing|config.yaml is missing, while {url}"):
        resume_notes(config)
    (root / "config.yaml").write_bytes(to_yaml(config).encode())
    assert (
        resume_notes(config) == []
        and resumed_run_folder(config) == root
        and newest_saved(config) == (root, 10)
    )
    assert not [*output.iterdir()], "nothing is written before the run has its lock"
    with refused(ConfigError, match=f"--seed: got 1, .*: {url} .--save. has a run"):
        resume_notes(command.parse(f"--save={url}", "--seed=1").config)
    command.data.write_text("[3]")
    with refused(ConfigError, match="position 20 .*has changed since"):
        resume_notes(config)
    fill(output / "checkpoint", 20)
    assert newest_saved(config) == (output / "checkpoint", 20)


def test_run_that_forgets_its_store_does_not_start_over(command, url) -> None:
    config = command.parse(f"--save={url}").config
    output = command.folder / "out"
    output.mkdir()
    (output / "config.yaml").write_text(to_yaml(config))
    other = command.parse("--save=memory://another").config
    assert resume_notes(other) == []
    fill(RemotePath(url), 10)
    for flags, got in (([], "none"), (["--save=memory://another"], "memory://another")):
        with refused(ConfigError, match=f"--save: got {got}, expected {url}: there the run in .*out has its"):
            resume_notes(command.parse(*flags).config)
    fill(output / "checkpoint", 20)
    remember_data(config, [])
    assert resume_notes(command.parse().config) == [f"--save: {url} before, none from here on"]


def test_run_that_forgets_its_store_does_not_go_back(command, url) -> None:
    """The disk has an earlier checkpoint, from before the run got its store."""
    output = command.folder / "out"
    begun = command.parse(f"--save={url}").config
    fill(output / "checkpoint", 4)
    (output / "config.yaml").write_text(to_yaml(begun))
    remember_data(command.parse("--resume-with-changed-data").config, [])
    others = [command.parse(*flags).config for flags in ([], ["--save=memory://other_place"])]
    fill(RemotePath(url), 2)
    assert [len(resume_notes(config)) for config in others] == [1, 1], "what another store is told"
    fill(RemotePath(url), 6)
    assert [len(resume_notes(config)) for config in others] == [1, 1], "its last one was interrupted"
    (RemotePath(url) / "iter_0000006" / "checksums.json").write_bytes(b"")
    said = f"expected {url}: .*/out has a checkpoint of step 6, .* after step 4, .* in .*/checkpoint"
    for config in others:
        with refused(ConfigError, match=said):
            resume_notes(config)
    (RemotePath(url) / "config.yaml").write_bytes(to_yaml(begun).encode())
    (RemotePath(url) / "data.json").write_bytes((output / "data.json").read_bytes())
    assert resume_notes(begun) == []


def test_run_whose_store_is_away_goes_on_on_the_disk(command, logged) -> None:
    output = command.folder / "out"
    with failing_store():
        config = command.parse("--save=failing://bucket/run").config
        fill(output / "checkpoint", 4)
        (output / "config.yaml").write_text(to_yaml(config))
        remember_data(command.parse("--resume-with-changed-data").config, [])
        fill(RemotePath("failing://bucket/run"), 2)
        die(0)
        assert len(resume_notes(command.parse().config)) == 1
    assert any("failing://bucket/run does not answer" in message for message in logged)
