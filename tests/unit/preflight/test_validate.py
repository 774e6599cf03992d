"""The rules that look at files, and that the good run passes; sentences are in checks/answers.txt."""

import dataclasses
import os
import sys
from pathlib import Path

import pytest
from command_line import make_run
from refusals import refused

from patch.config import to_yaml
from patch.device import MachineFacts
from patch.errors import ConfigError, DataError
from patch.preflight.parse import parse_args
from patch.preflight.validate import services_are_installed, validate_run

GPUS = MachineFacts(cuda_devices=2, cpu_cores=2)


def test_good_run_passes_and_writes_nothing(command):
    before = sorted(os.listdir(command.folder))
    assert validate_run(command.parse(FL="true").config, GPUS) == []
    assert sorted(os.listdir(command.folder)) == before


def test_checkpoint_without_a_complete_iteration_is_refused(command):
    folder = make_run(command.folder / "run", to_yaml(command.parse().config))
    (folder / "checkpoint" / "iter_0000010" / ".metadata").unlink()
    for load in (folder, folder / "checkpoint"):
        config = command.parse(PRETRAIN_CHECKPOINT_PATH=str(load)).config
        with refused(ConfigError, match="latest_checkpointed_iteration.txt is there, but no complete"):
            validate_run(config, command.machine)


@pytest.mark.parametrize(
    "below", ["", "checkpoint", "checkpoint/../", "checkpoint/iter_0000010", "checkpoint/last"]
)
def test_another_run_gives_shape_tokenizer_and_weights(command, below):
    shape = ["--num-layers=4", "--make-vocab-size-divisible-by=32", "--rotary-base=7"]
    other = command.parse(*shape).config
    folder = make_run(command.folder / "run", to_yaml(other))
    (folder / "checkpoint" / "last").symlink_to("iter_0000010")
    command.environ.pop("TOKENIZER_PATH")
    positions = dict(MODEL_SIZE="auto", PRETRAIN_CHECKPOINT_PATH=os.path.join(folder, below))
    config = command.parse(**positions).config
    assert dataclasses.replace(config.model, model_size="tiny") == other.model
    assert config.tokenizer_folder == str(command.tokenizer)
    assert validate_run(config, GPUS) == []
    assert command.parse("--num-layers=3", **positions).config.model.num_layers == 3


def test_checkpoint_alone_is_taken_with_a_tokenizer_of_its_own(command):
    folder = make_run(command.folder / "run", "")
    (folder / "config.yaml").unlink()
    validate_run(command.parse(PRETRAIN_CHECKPOINT_PATH=str(folder)).config, command.machine)
    with refused(ConfigError, match="position 2 MODEL_SIZE.*: auto reads .* their config.yaml"):
        command.parse(MODEL_SIZE="auto", PRETRAIN_CHECKPOINT_PATH=str(folder))
    command.environ.pop("TOKENIZER_PATH")
    with refused(ConfigError, match=r"TOKENIZER_PATH\): got .*run, expected a folder with one of"):
        validate_run(command.parse(PRETRAIN_CHECKPOINT_PATH=str(folder)).config, command.machine)


def test_another_runs_folder_is_read_from_anywhere(command, monkeypatch):
    monkeypatch.chdir(command.folder)
    command.environ["TOKENIZER_PATH"] = "tokenizer"
    first = command.parse(DATASET_PATH="rows.json", OUTPUT_BASEPATH="a", VALID_DATASET_PATH="none").config
    folder = make_run(command.folder / "a", to_yaml(first))
    (command.folder / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    del command.environ["TOKENIZER_PATH"]
    config = command.parse(MODEL_SIZE="auto", PRETRAIN_CHECKPOINT_PATH="../a").config
    assert (config.checkpoint.load, config.tokenizer_folder) == (str(folder), str(command.tokenizer))
    assert (config.data.valid_data_path, first.checkpoint.load) == (None, None)
    validate_run(config, GPUS)
    again = parse_args(["--config", "../a/config.yaml"], {}, command.machine).config
    assert again == first
    validate_run(again, command.machine)


def test_stop_file_that_was_left_is_refused(command):
    config = command.parse("--stop-file", str(command.data)).config
    with refused(ConfigError, match=r"--stop-file: got .*rows\.json, expected no file there: .* remove it"):
        validate_run(config, command.machine)
    (command.folder / "out").mkdir()
    (command.folder / "out" / "STOP").touch()
    with refused(ConfigError, match=r"--stop-file: got .*/out/STOP, expected no file there"):
        validate_run(command.parse().config, command.machine)


def test_every_file_of_a_glob_is_checked(command):
    for name in ("a.jsonl", "b.jsonl"):
        (command.folder / name).write_text("{}")
    config = command.parse(DATASET_PATH=f"{command.folder}/*.jsonl").config
    validate_run(config, command.machine)
    (command.folder / "b.jsonl").unlink()
    (command.folder / "b.jsonl").symlink_to("nowhere")
    with refused(DataError, match=r"position 20.*b\.jsonl does not exist"):
        validate_run(config, command.machine)


@pytest.mark.timeout(60)
def test_pipe_or_device_as_data_is_refused_before_it_is_read(command):
    os.mkfifo(command.folder / "pipe")
    for path in (str(command.folder / "pipe"), "/dev/zero", "/dev/urandom"):
        for field in ("DATASET_PATH", "VALID_DATASET_PATH"):
            with refused(DataError, match=f"{field}.*: {path} is a pipe or a device, expected a file"):
                validate_run(command.parse(**{field: path}).config, command.machine)


def test_layers_that_do_not_divide_go_to_the_middle_first(command):
    for pp, layers in ((3, [1, 2, 1]), (3, [2, 2, 1]), (2, [3, 2]), (4, [2, 3, 3, 2]), (3, [2, 2, 2])):
        flags = [f"--num-layers={sum(layers)}", f"--nproc-per-node={pp}"]
        assert command.parse(*flags, PP=str(pp)).config.stage_layers == layers


def _released(command, name):
    """A folder as the converter leaves it, or as Megatron-LM's old format has it."""
    folder = Path(command.hf_folder())
    (folder / "latest_checkpointed_iteration.txt").write_text("release\n")
    (folder / "release" / name).mkdir(parents=True)
    return folder


def test_converted_folder_is_taken_with_its_shape_and_tokenizer(command):
    folder = _released(command, "")
    for name in (".metadata", "common.pt", "metadata.json"):
        (folder / "release" / name).write_text("")
    (folder / "tokenizer.json").write_text("{}")
    del command.environ["TOKENIZER_PATH"]
    config = command.parse(MODEL_SIZE="auto", PRETRAIN_CHECKPOINT_PATH=str(folder)).config
    assert config.model.rope_scaling_factor == 4.0 and config.tokenizer_folder == str(folder)
    validate_run(config, GPUS)


def test_legacy_folder_is_refused_with_the_converters_name(command):
    folder = _released(command, "mp_rank_00")
    config = command.parse(MODEL_SIZE="auto", PRETRAIN_CHECKPOINT_PATH=str(folder)).config
    with refused(ConfigError, match=r"mp_rank_\*.*llama-patch convert mcore2hf"):
        validate_run(config, GPUS)


def test_a_service_whose_library_is_missing_is_refused(command, tmp_path, monkeypatch):
    """A folder that a service has left in the current one is no library."""
    (tmp_path / "mlflow").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    config = command.parse("--report-to=mlflow").config
    with refused(ConfigError, match="mlflow is not installed: pip install mlflow-skinny"):
        services_are_installed(config, command.machine)
    (tmp_path / "mlflow" / "__init__.py").touch()
    services_are_installed(config, command.machine)
