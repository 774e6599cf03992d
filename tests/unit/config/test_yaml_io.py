"""YAML: round trip, layering, files without end; other complaints are in checks/answers.txt."""

import dataclasses
import os
from pathlib import Path

import pytest
import yaml

from patch.config import to_yaml
from patch.config.choices import ZeroStage
from patch.config.yaml_io import read_yaml
from patch.errors import ConfigError
from patch.plan.resolve import resolve_run
from patch.preflight.parse import parse_args
from toolkits.train import __main__ as train

ABSENT = """
model: {window_size: none, precision_align: none}
parallel: {num_layers_per_virtual_pipeline_stage: 0, data_parallel_sharding: gradients}
training: {recompute_granularity: none}
optimizer: {optimizer_offload_policy: false, optimizer_offload_chunk_size: 0, simulated_device_memory: 0}
data: {valid_data_path: none, eval_interval: 0}
checkpoint: {load: none}
"""


def _write(command, text):
    file = command.folder / "run.yaml"
    file.write_text(text)
    return str(file)


def test_fed_back_yaml_repeats_the_run(command):
    config = command.parse("--adam-eps=1e-12", MODEL_SIZE="3B", TP="2", LR="5e-5").config
    file = _write(command, to_yaml(config))
    assert parse_args(["--config", file], {}, command.machine).config == config


@pytest.mark.parametrize("gone", ["", "  model_type: llama\n"])  # which files of before have not
def test_fed_back_yaml_needs_the_hf_folder_no_more(command, gone):
    config = command.parse(MODEL_SIZE="auto", PRETRAIN_CHECKPOINT_PATH=command.hf_folder()).config
    file = _write(command, to_yaml(config).replace(gone, ""))
    (command.folder / "hf" / "config.json").unlink()
    assert parse_args(["--config", file], {}, command.machine).config == config


def test_workers_get_the_run_that_the_launcher_has(command, monkeypatch):
    config = command.parse("--train-epochs=0.5", MODEL_SIZE="8B", SP="false").config
    assert train._resolved_run(Path(_write(command, to_yaml(config)))) == config
    parallel = dataclasses.replace(config.parallel, nnodes=2, min_nodes=1)
    elastic, _ = resolve_run(dataclasses.replace(config, parallel=parallel), command.machine)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert train._resolved_run(Path(_write(command, to_yaml(elastic)))) == dataclasses.replace(
        elastic, parallel=dataclasses.replace(parallel, nnodes=1)
    )


def test_shape_beside_model_size_in_one_layer_wins(command):
    file = _write(command, "model: {model_size: 1B, num_layers: 3}\n")
    argv = f"--config {file} --seq-length 8 --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1"
    argv += " --train-data-path a --output-path b"
    model = parse_args(argv.split(), {}, command.machine).config.model
    assert (model.num_layers, model.hidden_size) == (3, 2048)


def test_words_for_absent_values_are_none_inside_and_words_outside(command):
    """A config.yaml of earlier releases holds these words."""
    config = command.parse("--config", _write(command, ABSENT), "--simulated-device-memory=0").config
    data, optimizer = config.data, config.optimizer
    assert (config.model.window_size, config.model.precision_align) == (None, None)
    assert (config.training.recompute_granularity, optimizer.optimizer_offload_policy) == (None, None)
    assert (data.valid_data_path, data.eval_interval, config.checkpoint.load) == (None, None, None)
    assert (optimizer.simulated_device_memory, optimizer.optimizer_offload_chunk_size) == (None, None)
    assert config.parallel.data_parallel_sharding is ZeroStage.GRADIENTS
    written = yaml.safe_load(to_yaml(config))
    for section, values in yaml.safe_load(ABSENT).items():
        for name, word in values.items():
            assert written[section][name] == ("false" if word is False else word)


def test_variables_count_without_positions_too(command):
    lines = to_yaml(command.parse().config).splitlines(keepends=True)
    kept = [line for line in lines if "tokenizer_name_or_path" not in line and "dataset_type" not in line]
    assert len(kept) == len(lines) - 2
    file = command.folder / "run.yaml"
    file.write_text("".join(kept))
    config = parse_args(["--config", str(file)], command.environ, command.machine).config
    assert config.data.tokenizer_name_or_path == str(command.tokenizer)
    assert config.data.dataset_type == "raw"


_LEVELS = range(1, 7)
LISTS = ", ".join(f"&l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in _LEVELS)
MERGES = ", ".join(f"&m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 10)}]}}" for n in _LEVELS)
KEYS = ", ".join(f"k{n}: 1" for n in range(10))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 20_000, "malformed YAML: "),
        ("training: {seed: 1%s}" % ("1" * 400), "training.seed: got 111"),
        ("optimizer: {lr: 1%s}" % ("1" * 400), "optimizer.lr: got 111"),
        ("training: {seed: 1%s}" % ("1" * 5000), "malformed YAML: got '111"),
        ("training: {seed: 0x1%s}" % ("f" * 5000), "seed: got a number of thousands of digits, expected"),
        (f"training: {{seed: [&l0 [x], {LISTS}]}}", "training.seed: got [['x'], [['x'], ['x'], "),
        (f"training: [&m0 {{{KEYS}}}, {MERGES}]", "got 100000 keys by <<"),
        ("x" * (1 << 26) + "y", "cannot be read: more than 67108864 bytes"),
    ],
)
def test_file_without_end_is_explained_in_a_short_line(command, text, message):
    with pytest.raises(ConfigError) as caught:
        command.parse("--config", _write(command, text))
    assert message in str(caught.value) and "run.yaml" in str(caught.value)
    assert len(str(caught.value)) < 2000


@pytest.mark.timeout(20)
def test_a_pipe_is_read_if_something_writes_into_it(tmp_path: Path) -> None:
    reading, writing = os.pipe()  # as a shell's <(...)
    os.write(writing, b"training: {seed: 7}\n")
    os.close(writing)
    assert read_yaml(f"/dev/fd/{reading}") == {"seed": 7}
    os.mkfifo(tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match="it is a pipe or a device that has nothing to read"):
        read_yaml(tmp_path / "run.yaml")
