"""What is said of a run that is allowed: values without effect, and what may surprise."""

from pathlib import Path

from patch.device import MachineFacts
from patch.preflight.validate import run_warnings, validate_run

CPU = MachineFacts(cuda_devices=0, cpu_cores=2)
GPUS = MachineFacts(cuda_devices=2, cpu_cores=2)


def _with_two_tokenizers(command, text):
    """A run from a Hugging Face folder, with a tokenizer of its own that holds `text`."""
    (command.tokenizer / "tokenizer.json").write_text(text)
    return command.parse(MODEL_SIZE="auto", PRETRAIN_CHECKPOINT_PATH=command.hf_folder()).config


def test_tokenizer_that_is_not_the_weights_own_is_said(command):
    config = _with_two_tokenizers(command, "{}")
    (note,) = validate_run(config, GPUS)
    assert note == (
        f"--tokenizer-name-or-path (TOKENIZER_PATH): {command.tokenizer} is used, not the tokenizer in "
        f"{command.folder / 'hf'}, which has the same files"
    )
    assert run_warnings(config) == []


def test_tokenizer_that_differs_from_the_weights_own_is_warned_of(command):
    config = _with_two_tokenizers(command, "{ }")
    assert validate_run(config, GPUS) == []
    (warning,) = run_warnings(config)
    assert warning.startswith(f"--tokenizer-name-or-path (TOKENIZER_PATH): {command.tokenizer} is used, not ")
    assert warning.endswith("hf, whose tokenizer.json differs: the weights were trained with that one")


def test_tokenizer_of_the_weights_by_another_name_is_no_news(command):
    folder = command.hf_folder()
    flag = f"--tokenizer-name-or-path={folder}/../hf"
    config = command.parse(flag, MODEL_SIZE="auto", PRETRAIN_CHECKPOINT_PATH=folder).config
    assert validate_run(config, GPUS) == run_warnings(config) == []


def test_tokenizer_beside_weights_without_one_is_no_news(command):
    folder = command.hf_folder()
    (Path(folder) / "tokenizer.json").unlink()
    config = command.parse(MODEL_SIZE="auto", PRETRAIN_CHECKPOINT_PATH=folder).config
    assert validate_run(config, GPUS) == run_warnings(config) == []


def test_weights_with_other_numerics_are_noted(command):
    del command.environ["TOKENIZER_PATH"]
    config = command.parse(
        "--rope-scaling-factor=2", MODEL_SIZE="auto", PRETRAIN_CHECKPOINT_PATH=command.hf_folder()
    ).config
    notes = validate_run(config, GPUS)
    assert len(notes) == 1 and notes[0].startswith("--rope-scaling-factor: 2.0 here, 4.0 in ")
