"""What may change between two runs in one OUTPUT_BASEPATH."""

import os
from dataclasses import replace

import pytest
from refusals import refused

from patch.config import to_yaml, user_message
from patch.errors import CheckpointError, ConfigError
from patch.preflight.data_record import SetRecord
from patch.preflight.resume_guard import check_tokens, remember_data, resume_notes

ANEW = "another OUTPUT_BASEPATH"
WEIGHTS = "this folder as position 22"


@pytest.fixture
def begun(command, run_folder):
    """Puts a run with a checkpoint at the command's OUTPUT_BASEPATH."""

    def begin(*flags, sets=(), **positions):
        config = command.parse(*flags, **positions).config
        remember_data(config, sets)
        run_folder(command.folder / "out", to_yaml(config))
        return config

    return begin


def test_same_run_has_no_changes(begun):
    assert resume_notes(begun()) == []


def test_folder_without_checkpoints_is_free(command):
    config = command.parse().config
    assert resume_notes(config) == []
    remember_data(config, [])
    assert resume_notes(command.parse("--num-layers=4").config) == []


@pytest.mark.parametrize(
    ("flags", "positions", "message", "cure"),
    [
        (["--num-layers=4"], {}, "--num-layers: got 4, expected 2: .* run with another model shape", ANEW),
        ([], dict(MODEL_SIZE="1B"), "position 2 MODEL_SIZE.*: got 1B, expected tiny: .* model shape", ANEW),
        ([], dict(SEQ_LEN="128"), "position 7 SEQ_LEN.*: got 128, expected 64: .* another model shape", ANEW),
        ([], dict(PAD_LEN="16"), "position 8 PAD_LEN.*: got 16, expected 32: .* other samples", WEIGHTS),
        (["--tokenizer-name-or-path=/b"], {}, "TOKENIZER_PATH.*: got /b, .* with another tokenizer", ANEW),
        ([], dict(GLOBAL_BATCH_SIZE="16"), "position 4 .*: got 16, expected 8: .* another order", WEIGHTS),
        (["--packing"], {}, "--packing .*: got --packing, expected --no-packing: .* other samples of its "
         "data; give --no-packing, or --resume-with", WEIGHTS),
        (["--seed=1"], {}, "--seed: got 1, expected 1234: .* another order", WEIGHTS),
        ([], dict(PR="bf16"), "position 9 PR.*: got bf16, expected fp32: .* another type", ANEW),
    ],
)  # fmt: skip
def test_change_that_cannot_be_resumed_is_refused(command, begun, flags, positions, message, cure):
    begun()
    with refused(ConfigError, match=message) as caught:
        resume_notes(command.parse(*flags, **positions).config)
    assert cure in user_message(caught.value)


@pytest.mark.parametrize(
    ("flags", "positions", "notes"),
    [
        (["--nproc-per-node=2"], {}, ["--nproc-per-node"]),
        ([], dict(TP="2"), ["--tensor-model-parallel-size", "--nproc-per-node"]),
        (["--nproc-per-node=4"], dict(PP="2"), ["--pipeline-model-parallel-size", "--nproc-per-node"]),
    ],
)
def test_another_layout_is_listed_and_taken(command, begun, flags, positions, notes):
    begun()
    found = resume_notes(command.parse(*flags, **positions).config)
    assert sorted(note.split(" ")[0].rstrip(":") for note in found) == sorted(notes)


def test_8_bit_products_may_begin_and_end_on_a_resume(command, begun):
    """Weights and states are bf16's."""
    begun(PR="bf16")
    fp8 = command.parse("--fp8-recipe=rowwise", PR="fp8").config
    assert resume_notes(fp8) == [
        "--precision (position 9 PR): bf16 before, fp8 from here on",
        "--fp8-recipe: default before, rowwise from here on",
    ]
    with refused(ConfigError, match="got fp16, expected bf16: .* another type"):
        resume_notes(command.parse(PR="fp16").config)


def test_data_and_its_order_change_only_where_the_user_says_so(command, begun):
    begun()
    other = command.folder / "other.json"
    other.write_text("[2]")
    positions = dict(GLOBAL_BATCH_SIZE="16", DATASET_PATH=str(other), PAD_LEN="16")
    changed = command.parse("--resume-with-changed-data", "--seed=7", **positions).config
    found = [note.split(" ")[0].rstrip(":") for note in resume_notes(changed)]
    expected = ["--global-batch-size", "--max-padding-length", "--seed", "--train-data-path"]
    assert sorted(found) == sorted([*expected, "--resume-with-changed-data"])
    remember_data(changed, [])
    record = (command.folder / "out" / "data.json").read_text()
    remember_data(command.parse().config, [])
    assert (command.folder / "out" / "data.json").read_text() == record
    with refused(ConfigError, match="--num-layers: got 4.* another model shape"):
        resume_notes(command.parse("--resume-with-changed-data", "--num-layers=4").config)


def test_same_processes_on_other_machines_are_taken(command, begun):
    begun("--nproc-per-node=2")
    meeting = dict(NODE_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="29500", NPROC_PER_NODE="1")
    command.environ.update(meeting)
    notes = resume_notes(command.parse("--nnodes=2").config)
    assert [note.split(" ")[0] for note in notes] == ["--nnodes:", "--nproc-per-node"]


def test_length_is_kept_in_pretraining_alone(command, begun):
    command.environ["MP_DATASET_TYPE"] = "idxmap"
    for ending in (".bin", ".idx"):
        (command.folder / f"text{ending}").touch()
    positions = dict(SFT="false", WARMUP_TOKENS_OR_ITERS="0", DATASET_PATH=str(command.folder / "text"))
    begun(TRAIN_TOKENS_OR_ITERS="5120", **positions)
    wanted = (
        r"position 23 .*: got 10240 tokens \(20 steps\), expected 5120 tokens \(10 steps\): "
        r".* order of its samples; give 5120 tokens \(10 steps\) again"
    )
    with refused(ConfigError, match=wanted):
        resume_notes(command.parse(TRAIN_TOKENS_OR_ITERS="10240", **positions).config)
    larger = {**positions, "TRAIN_TOKENS_OR_ITERS": "5120", "GLOBAL_BATCH_SIZE": "16"}
    with refused(ConfigError, match="position 4 .* in another order"):
        resume_notes(command.parse(**larger).config)
    notes = resume_notes(command.parse("--resume-with-changed-data", **larger).config)
    assert [note.split(" ")[0] for note in notes] == [
        "--global-batch-size", "--train-iters", "--resume-with-changed-data:",
    ]  # fmt: skip


def test_tokenizer_beside_other_weights_is_another_tokenizer(command, begun):
    command.environ.pop("TOKENIZER_PATH")
    begun(PRETRAIN_CHECKPOINT_PATH="/a")
    with refused(ConfigError, match="got /b, expected /a: .* another tokenizer"):
        resume_notes(command.parse(PRETRAIN_CHECKPOINT_PATH="/b").config)


def test_other_changes_are_listed(command, begun):
    layout = dict(TP="2", PP="2")
    begun("--nproc-per-node=4", BATCH_SIZE="2", **layout)
    changed = command.parse(
        "--nproc-per-node=4", "--reduce-bucket-size=1e6", "--num-layers-per-virtual-pipeline-stage=1",
        **layout, BATCH_SIZE="4", LR="2e-3", SP="true", DO="true", TRAIN_TOKENS_OR_ITERS="40",
    ).config  # fmt: skip
    assert resume_notes(changed) == [
        "--num-layers-per-virtual-pipeline-stage (MP_VP): 0 before, 1 from here on",
        "--sequence-parallel (position 13 SP): False before, True from here on",
        "--use-distributed-optimizer (position 14 DO): False before, True from here on",
        "--micro-batch-size (position 3 BATCH_SIZE): 2 before, 4 from here on",
        "--train-iters (position 23 TRAIN_TOKENS_OR_ITERS): 20 before, 40 from here on",
        "--lr (position 5 LR): 0.001 before, 0.002 from here on",
        "--reduce-bucket-size: 500000000 before, 1000000 from here on",
    ]


def test_two_spellings_of_one_path_are_no_change(command, begun):
    begun()
    again = command.parse(DATASET_PATH=f"{command.folder}/./rows.json").config
    assert resume_notes(again) == []


MIB = 2**20


@pytest.mark.parametrize("place", [0, 3 * MIB // 2 - MIB // 2, 3 * MIB - 1], ids=["first", "half", "last"])
def test_data_that_changed_in_place_is_refused(command, begun, place):
    command.data.write_bytes(bytes(3 * MIB))
    config = begun()
    changed = bytearray(3 * MIB)
    changed[place] = 1
    command.data.write_bytes(changed)
    with refused(ConfigError, match=r"position 20 DATASET_PATH.*rows\.json has changed since"):
        resume_notes(config)


def test_data_that_grew_is_refused_and_put_back_is_taken(command, begun):
    command.data.write_bytes(bytes(3 * MIB))
    config = begun()
    command.data.write_bytes(bytes(3 * MIB + 1))
    with refused(ConfigError, match="has changed since"):
        resume_notes(config)
    command.data.write_bytes(bytes(3 * MIB))
    os.utime(command.data, (0, 0))  # a copy from elsewhere
    assert resume_notes(config) == []


def test_equal_data_at_another_path_is_taken_and_listed(command, begun):
    command.data.write_bytes(bytes(3 * MIB))
    begun()
    moved = command.folder / "moved" / "renamed.jsonl"
    moved.parent.mkdir()
    command.data.rename(moved)
    (note,) = resume_notes(command.parse(DATASET_PATH=str(moved)).config)
    assert (
        note == f"--train-data-path (position 20 DATASET_PATH): {command.data} before, {moved} from here on"
    )


def test_other_data_at_another_path_is_refused(command, begun):
    begun()
    other = command.folder / "other.json"
    other.write_text("[1]")
    with refused(ConfigError, match="position 20 DATASET_PATH.*: got .*other.json, .* other data") as caught:
        resume_notes(command.parse(DATASET_PATH=str(other)).config)
    assert WEIGHTS in user_message(caught.value)


def test_folder_with_one_file_more_is_other_data(command, begun):
    folder = command.folder / "rows"
    folder.mkdir()
    (folder / "a.json").write_text("[1]")
    config = begun(DATASET_PATH=str(folder))
    assert resume_notes(config) == []
    (folder / "b.json").touch()
    with refused(ConfigError, match="/rows has changed since .*number of files"):
        resume_notes(config)


@pytest.mark.parametrize(
    ("text", "same"), [("3 {0} 1 {0}", True), (".7 {0} .3 {0}", False), ("{0} {0}", False)]
)
def test_weights_of_a_blend_are_kept(command, begun, text, same):
    data = str(command.data)
    begun(DATASET_PATH=f"0.75 {data} 0.25 {data}")
    config = command.parse(DATASET_PATH=text.format(data)).config
    if same:
        assert len(resume_notes(config)) == 1
    else:
        with refused(ConfigError, match="position 20 DATASET_PATH.* other data"):
            resume_notes(config)


@pytest.mark.parametrize(
    ("name", "chosen", "message"),
    [
        (
            "tokenizer.json",
            False,
            "TOKENIZER_PATH.*: the tokenizer in .*/encoder has changed since",
        ),
        (
            "chat_template.jinja",
            False,
            "TOKENIZER_PATH.*: the chat template in .*/encoder is not the",
        ),
        ("mine.jinja", True, "--chat-template: .*/mine.jinja is not the chat template with which"),
    ],
)
def test_tokenizer_or_template_that_changed_in_place_is_refused(command, begun, name, chosen, message):
    folder = command.folder / "encoder"
    folder.mkdir()
    for file in ("tokenizer.json", "chat_template.jinja", "mine.jinja"):
        (folder / file).write_text("{}")
    command.environ["TOKENIZER_PATH"] = str(folder)
    config = begun(*([f"--chat-template={folder / 'mine.jinja'}"] if chosen else []))
    assert resume_notes(config) == []
    (folder / name).write_text("{ }")
    with refused(ConfigError, match=message):
        resume_notes(config)


def test_tokenizer_and_template_that_moved_are_taken_and_listed(command, begun):
    """The text of a template counts, whether a file is named or the tokenizer has it, in either file."""
    settings = command.tokenizer / "tokenizer_config.json"
    settings.write_text('{"chat_template": "{{ messages }}"}')
    begun()
    moved = command.tokenizer.rename(command.folder / "moved")
    (moved / settings.name).write_text("{}")
    (moved / "chat_template.jinja").write_text("{{ messages }}")
    command.environ["TOKENIZER_PATH"] = str(moved)
    (note,) = resume_notes(command.parse().config)
    assert note.startswith("--tokenizer-name-or-path (TOKENIZER_PATH): ")
    (command.folder / "mine.jinja").write_text("{{ messages }}")
    chosen = command.parse(f"--chat-template={command.folder / 'mine.jinja'}").config
    assert len(resume_notes(chosen)) == 2
    (command.folder / "mine.jinja").write_text("{{ messages[0] }}")
    with refused(ConfigError, match="--chat-template: .*mine.jinja is not the chat template"):
        resume_notes(chosen)


def test_built_in_template_is_the_same_by_name_alone(command, begun):
    begun("--chat-template=chatml")
    with refused(ConfigError, match="--chat-template: got llama3, expected chatml: .* other samples"):
        resume_notes(command.parse("--chat-template=llama3").config)
    # Whether the tokenizer's own template is this one is seen in the tokens.
    assert len(resume_notes(command.parse().config)) == 1


def test_columns_may_be_given_in_another_order(command, begun):
    begun("--columns=instruction=asked,output=said")
    assert len(resume_notes(command.parse("--columns=output=said, instruction=asked").config)) == 1
    with refused(ConfigError, match="--columns: got output=said, expected instruction=asked,output=said: "):
        resume_notes(command.parse("--columns=output=said").config)


SET = SetRecord(
    "rows.json",
    "1" * 64,
    "2" * 64,
    {"transformers": "5.1.0", "the chat template": "3" * 64},
    reads_clock=False,
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"transformers": "5.2.0"},
            r"moved: .* has changed: transformers \(5.1.0 before, 5.2.0 now\); expected .* put that back",
        ),
        ({"the chat template": "4" * 64}, "what has changed: the chat template; "),
        ({}, "what has changed: something that is not recorded; "),
    ],
)
def test_other_tokens_are_refused_with_what_has_changed(command, begun, changes, message):
    config = begun(sets=[SET])
    assert check_tokens(config, [replace(SET, path="moved", origin=SET.origin | changes)]) == []
    with refused(ConfigError, match=message) as caught:
        check_tokens(config, [replace(SET, path="moved", tokens="5" * 64, origin=SET.origin | changes)])
    assert WEIGHTS in str(caught.value)


def test_template_that_writes_the_date_is_named_and_taken(command, begun):
    """Nobody can go back to the day on which the run began; the sizes say that no sample has moved."""
    dated = replace(SET, reads_clock=True)
    config = begun(sets=[dated])
    (warning,) = check_tokens(config, [replace(dated, tokens="5" * 64)])
    assert "the chat template writes the date" in warning
    with refused(ConfigError, match="something that is not recorded"):
        check_tokens(config, [replace(dated, tokens="5" * 64, sizes="6" * 64)])


@pytest.mark.parametrize("content", [b"\xff\xfe", b"{", b'{"files": "1"}', b"[]", b'{"sets": [{}]}'])
def test_damaged_record_is_named(command, begun, content):
    config = begun()
    (command.folder / "out" / "data.json").write_bytes(content)
    with refused(ConfigError, match=r"out/data\.json cannot be read .* remove it to resume without a check"):
        resume_notes(config)


def test_record_that_cannot_be_written_is_named(command):
    config = command.parse().config
    (command.folder / "out" / "data.json").mkdir(parents=True)
    with refused(CheckpointError, match=r"position 25.*data\.json cannot be written: "):
        remember_data(config, [])


def test_what_the_data_looked_like_is_not_forgotten_on_resume(command, begun):
    config = begun()
    command.data.write_text("[1]")
    remember_data(config, [])
    with refused(ConfigError, match="has changed since"):
        resume_notes(config)


def test_run_without_a_record_is_resumed(command, begun):
    config = begun()
    (command.folder / "out" / "data.json").unlink()
    assert resume_notes(config) == [] and check_tokens(config, [SET]) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {", r"out/config\.yaml: malformed YAML"),
        ("model: {num_layers: 2}", r"out/config\.yaml: lacks hidden_size, .* expected a whole run"),
        (None, r"out/config\.yaml is missing, while .*out/checkpoint holds checkpoints: .* put it back"),
    ],
)
def test_unusable_config_of_the_run_is_named(command, begun, text, message):
    config = begun()
    file = command.folder / "out" / "config.yaml"
    file.unlink()
    if text is not None:
        file.write_text(text)
    with refused(ConfigError, match=message):
        resume_notes(config)


def test_checkpoints_without_their_tracker_are_guarded_too(command, begun):
    begun()
    (command.folder / "out" / "checkpoint" / "latest_checkpointed_iteration.txt").unlink()
    with refused(ConfigError, match="another model shape"):
        resume_notes(command.parse("--num-layers=4").config)
