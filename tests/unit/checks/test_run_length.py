"""--train-epochs: beats position 23, becomes steps when the set is known, and a resume keeps it."""


import pytest
import yaml
from command_line import make_run
from refusals import refused

from patch.checks.run_length import num_train_samples, with_samples
from patch.config import to_yaml
from patch.errors import ConfigError
from patch.plan.describe import describe_plan
from patch.preflight.parse import parse_args
from patch.preflight.validate import validate_run


def test_epochs_alone_are_a_length(command, tmp_path):
    values = yaml.safe_load(to_yaml(command.parse().config))
    values["training"] = {k: v for k, v in values["training"].items() if not k.startswith("train_")}
    flags = ["--config", str(tmp_path / "run.yaml")]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    found = parse_args([*flags, "--train-epochs=3"], {}, command.machine)
    assert found.config.training.train_epochs == 3.0 and not found.notes
    with refused(ConfigError, match="missing: --train-iters"):
        parse_args(flags, {}, command.machine)


def test_config_yaml_with_the_resolved_steps_repeats_the_run(command, tmp_path):
    config = with_samples(command.parse("--train-epochs=2").config, 80)
    assert config.training.train_iters == 10
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    again = parse_args([f"--config={tmp_path / 'config.yaml'}"], {}, command.machine).config
    assert with_samples(again, 80) == config


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


def test_plan_says_that_rows_are_packed_and_where_a_run_goes_on(command):
    plain = describe_plan(command.parse().config, command.machine)
    assert "\npacking " not in plain and "\nresume " not in plain
    command.environ["MP_SFT_PACKING"] = "true"
    config = command.parse().config
    plan = describe_plan(config, command.machine)
    assert "\npacking     on: several rows share a sequence of 32 tokens" in plan
    make_run(command.folder / "out", "")
    root = command.folder / "out" / "checkpoint"
    for newest in ("10", "20"):  # the second is lost: the newest that is there is taken
        (root / "latest_checkpointed_iteration.txt").write_text(newest)
        line = f"\nresume      after step 10 of {config.training.train_iters}, from {root}"
        assert line in describe_plan(config, command.machine)
