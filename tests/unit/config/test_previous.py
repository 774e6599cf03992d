"""What may change between two runs in one OUTPUT_BASEPATH."""

import pytest

from patch.config import compare_with_previous, to_yaml
from patch.errors import ConfigError


def test_same_run_has_no_changes(command):
    config = command.parse().config
    assert compare_with_previous(config, to_yaml(config)) == []


@pytest.mark.parametrize(
    ("flags", "positions", "message"),
    [
        (["--num-layers=4"], {}, "--num-layers: got 4, expected 2: .* holds a run of another model shape"),
        ([], dict(SEQ_LEN="128"), "position 7 SEQ_LEN.*: got 128, expected 64: .* another model shape"),
        ([], dict(DATASET_PATH="other"), "position 20 DATASET_PATH.*: got other, .* another data"),
        ([], dict(PAD_LEN="16"), "position 8 PAD_LEN.*: got 16, expected 32: .* another data"),
        (["--tokenizer-name-or-path=b"], {}, "TOKENIZER_PATH.*: got b, .* holds a run of another tokenizer"),
    ],
)
def test_change_that_cannot_be_resumed_is_refused(command, flags, positions, message):
    before = to_yaml(command.parse().config)
    with pytest.raises(ConfigError, match=message):
        compare_with_previous(command.parse(*flags, **positions).config, before)


def test_tokenizer_beside_other_weights_is_another_tokenizer(command):
    command.environ.pop("TOKENIZER_PATH")
    before = to_yaml(command.parse(PRETRAIN_CHECKPOINT_PATH="a").config)
    with pytest.raises(ConfigError, match="got b, expected a: .* another tokenizer"):
        compare_with_previous(command.parse(PRETRAIN_CHECKPOINT_PATH="b").config, before)


def test_other_changes_are_listed(command):
    before = to_yaml(command.parse().config)
    changed = command.parse(LR="2e-3", TP="2", TRAIN_TOKENS_OR_ITERS="40").config
    assert compare_with_previous(changed, before) == [
        "--tensor-model-parallel-size (position 10 TP): 1 before, 2 from here on",
        "--nproc-per-node (NPROC_PER_NODE): 1 before, 2 from here on",
        "--train-iters (position 23 TRAIN_TOKENS_OR_ITERS): 20 before, 40 from here on",
        "--lr (position 5 LR): 0.001 before, 0.002 from here on",
    ]


def test_two_spellings_of_one_path_are_no_change(command):
    before = to_yaml(command.parse().config)
    again = command.parse(DATASET_PATH=f"{command.folder}/./rows.json").config
    assert compare_with_previous(again, before) == []


def test_broken_previous_file_is_named(command):
    with pytest.raises(ConfigError, match="out/config.yaml: malformed YAML"):
        compare_with_previous(command.parse().config, "model: {")
