"""--train-epochs: beats position 23, becomes steps when the set is known, and a resume keeps it."""

import dataclasses

import pytest
import yaml
from refusals import refused

from patch.checks.run_length import num_train_samples, with_samples
from patch.config import to_yaml
from patch.errors import ConfigError
from patch.plan.describe import describe_plan
from patch.plan.resolve import resolve_sharding
from patch.preflight.parse import parse_args
from patch.preflight.resume_guard import remember_data, resume_notes
from patch.preflight.validate import validate_run


def test_epochs_beat_position_23_and_one_line_says_so(command):
    found = command.parse("--train-epochs=2")
    config = found.config
    assert (config.training.train_iters, config.training.train_epochs) == (0, 2.0)
    note = "--train-iters (position 23 TRAIN_TOKENS_OR_ITERS) has no effect with --train-epochs 2"
    assert note in found.notes
    validate_run(config, command.machine)
    resolved, _ = resolve_sharding(config, command.machine)
    assert "run         2 epochs" in describe_plan(resolved, command.machine)


def test_epochs_alone_are_a_length(command, tmp_path):
    values = yaml.safe_load(to_yaml(command.parse().config))
    values["training"] = {k: v for k, v in values["training"].items() if not k.startswith("train_")}
    flags = ["--config", str(tmp_path / "run.yaml")]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    found = parse_args([*flags, "--train-epochs=3"], {}, command.machine)
    assert found.config.training.train_epochs == 3.0 and not found.notes
    with refused(ConfigError, match="missing: --train-iters"):
        parse_args(flags, {}, command.machine)


def test_later_layer_decides_the_length(command, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("training: {train_epochs: 2}\n")
    by_position = command.parse(f"--config={file}").config.training
    assert (by_position.train_iters, by_position.train_epochs) == (20, None)
    file.write_text("training: {train_iters: 30}\n")
    by_flag = command.parse(f"--config={file}", "--train-epochs=2").config.training
    assert (by_flag.train_iters, by_flag.train_epochs) == (0, 2.0)


def test_config_yaml_with_the_resolved_steps_repeats_the_run(command, tmp_path):
    config = with_samples(command.parse("--train-epochs=2").config, 80)
    assert config.training.train_iters == 10
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    again = parse_args([f"--config={tmp_path / 'config.yaml'}"], {}, command.machine).config
    assert with_samples(again, 80) == config


@pytest.mark.parametrize("positions", [{}, dict(TRAIN_TOKENS_OR_ITERS="0")])
def test_a_run_without_steps_is_refused(command, positions):
    config = command.parse(**positions).config
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, train_iters=0))
    with refused(ConfigError, match="position 23 .*: got 0, expected at least 1, or --train-epochs"):
        validate_run(config, command.machine)


def test_tokens_of_less_than_a_step_do_not_matter_with_epochs(command):
    positions = dict(SFT="false", TRAIN_TOKENS_OR_ITERS="0", WARMUP_TOKENS_OR_ITERS="0")
    command.environ["MP_DATASET_TYPE"] = "idxmap"
    assert command.parse("--train-epochs=1", **positions).config.training.train_epochs == 1.0


@pytest.mark.parametrize(
    ("epochs", "one_pass", "samples"),
    [
        (1, 16, 16),
        (1, 17, 24),  # the last step is filled with the first samples of the next epoch
        (2, 17, 40),
        (0.5, 17, 16),
        (0.1, 240, 24),  # 0.1 * 240 is 24.000000000000004 in floating point
        (3, 1, 8),
        (1e-9, 5, 8),
    ],
)
def test_each_sample_is_taken_at_least_so_often(command, epochs, one_pass, samples):
    assert num_train_samples(command.parse(f"--train-epochs={epochs}").config, one_pass) == samples


def test_steps_that_were_given_do_not_depend_on_the_set(command):
    assert {num_train_samples(command.parse().config, one_pass) for one_pass in (1, 7, 10**9)} == {160}


PRETRAINING = dict(SFT="false", TRAIN_TOKENS_OR_ITERS="5120", WARMUP_TOKENS_OR_ITERS="1024")


@pytest.mark.parametrize(
    ("flags", "positions", "steps"),
    [(["--train-epochs=2"], {}, 16), ([], {}, 20), ([], PRETRAINING, 16)],
    ids=["epochs", "steps", "tokens"],
)
def test_samples_of_smaller_batches_before_a_resume_are_counted(command, flags, positions, steps):
    """After 12 steps of 4 samples, that is 48 fewer than 12 of 8: epochs stay, or steps, or tokens."""
    config = command.parse(*flags, **positions).config
    samples = num_train_samples(config, 40, ahead=-48)
    assert samples == 48 + (steps - 12) * 8
    assert with_samples(config, samples, ahead=-48).training.train_iters == steps


def test_warmup_is_compared_with_the_steps_once_they_are_known(command):
    config = command.parse("--train-epochs=1", WARMUP_TOKENS_OR_ITERS="5").config
    validate_run(config, command.machine)
    assert with_samples(config, 48).training.train_iters == 6
    with refused(ConfigError, match="position 24 .*: got 5, expected less than the run's 5"):
        with_samples(config, 40)


@pytest.fixture
def begun(command, run_folder):
    """Puts a run of 2 epochs, which are 10 steps, at the command's OUTPUT_BASEPATH."""
    config = command.parse("--train-epochs=2").config
    remember_data(config, [])
    run_folder(command.folder / "out", to_yaml(with_samples(config, 80)))


def test_resume_of_the_same_epochs_changes_nothing(command, begun):
    assert resume_notes(command.parse("--train-epochs=2").config) == []


def test_resume_for_more_epochs_is_said(command, begun):
    assert resume_notes(command.parse("--train-epochs=3").config) == [
        "--train-epochs: 2.0 before, 3.0 from here on"
    ]


def test_pretraining_of_other_epochs_is_refused(command, run_folder):
    command.environ["MP_DATASET_TYPE"] = "idxmap"
    positions = dict(SFT="false", TRAIN_TOKENS_OR_ITERS="0", WARMUP_TOKENS_OR_ITERS="0")
    positions |= dict(DATASET_PATH=str(command.folder / "set"))
    for ending in (".bin", ".idx"):
        (command.folder / f"set{ending}").touch()
    config = command.parse("--train-epochs=2", **positions).config
    remember_data(config, [])
    run_folder(command.folder / "out", to_yaml(with_samples(config, 80)))
    assert resume_notes(command.parse("--train-epochs=2", **positions).config) == []
    with refused(ConfigError, match="got 3 epochs, expected 2 epochs: .* run of another length"):
        resume_notes(command.parse("--train-epochs=3", **positions).config)
    same_steps = command.parse(**positions | dict(TRAIN_TOKENS_OR_ITERS=str(10 * 8 * 64))).config
    assert [note.split(":")[0] for note in resume_notes(same_steps)] == ["--train-epochs"]


def test_plan_says_that_rows_are_packed(command):
    assert "\npacking " not in describe_plan(command.parse().config, command.machine)
    command.environ["MP_SFT_PACKING"] = "true"
    assert "\npacking     on: several rows share a sequence of 32 tokens" in describe_plan(
        command.parse().config, command.machine
    )


def test_plan_says_where_a_run_goes_on(command, run_folder):
    config = command.parse().config
    assert "\nresume " not in describe_plan(config, command.machine)
    run_folder(command.folder / "out", "")
    root = command.folder / "out" / "checkpoint"
    line = f"\nresume      after step 10 of {config.training.train_iters}, from {root}"
    assert line in describe_plan(config, command.machine)
    (root / "latest_checkpointed_iteration.txt").write_text("20")  # lost: the newest that is there is taken
    assert line in describe_plan(config, command.machine)
