"""What may change between two runs in one OUTPUT_BASEPATH."""

import json
import os
from dataclasses import replace

import pytest
from command_line import CPU, begin
from refusals import refused

from patch.errors import CheckpointError, ConfigError
from patch.preflight.data_record import SetRecord
from patch.preflight.resume_guard import check_tokens, remember_data, resume_notes
from patch.preflight.validate import adapters_are_those_loaded

WEIGHTS = "this folder as position 22"


def _begun(command, *flags, sets=(), **positions):
    """A run with a checkpoint at the command's OUTPUT_BASEPATH."""
    return begin(command.parse(*flags, **positions).config, sets)


def test_folder_without_checkpoints_is_free(command):
    config = command.parse().config
    assert resume_notes(config) == []
    remember_data(config, [])
    assert resume_notes(command.parse("--num-layers=4").config) == []


def test_data_that_the_user_changed_are_recorded_and_no_other_run_overwrites_the_record(command):
    """Permitted changes are in checks/answers.txt."""
    _begun(command)
    other = command.folder / "other.json"
    other.write_text("[2]")
    remember_data(command.parse("--resume-with-changed-data", DATASET_PATH=str(other)).config, [])
    record = (command.folder / "out" / "data.json").read_text()
    remember_data(command.parse().config, [])
    assert (command.folder / "out" / "data.json").read_text() == record


def test_run_of_before_which_names_no_family_goes_on_as_what_it_is(command):
    begun, file = _begun(command), command.folder / "out" / "config.yaml"
    file.write_text(file.read_text().replace("  model_type: llama\n", ""))
    assert resume_notes(begun) == []
    (note,) = resume_notes(command.parse("--model-type=mistral").config)
    assert note == "--model-type: llama before, mistral from here on"
    with refused(ConfigError, match="--add-qkv-bias: got .* another model shape"):
        resume_notes(command.parse("--model-type=qwen2").config)


def test_a_run_keeps_the_weights_that_train(command):
    _begun(command, "--freeze=mlp")
    (note,) = resume_notes(command.parse("--freeze=mlp\\.").config)  # the same weights
    assert note.startswith("--freeze: mlp before")
    with refused(ConfigError, match="--freeze: got embed, expected mlp: .*trains other weights"):
        resume_notes(command.parse("--freeze=embed").config)


def test_adapters_of_a_run_need_the_folder_that_it_began_from_no_more(command):
    folder, file = command.folder / "adapter", "adapter_config.json"
    folder.mkdir()
    described = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / file).write_text(json.dumps(described))
    begun = _begun(command, f"--lora-load={folder}")
    (folder / file).unlink()
    again = command.parse(f"--lora-load={folder}")
    adapters_are_those_loaded(again.config, CPU)
    assert again.config.adapter == begun.adapter and resume_notes(again.config) == []
    flags = ("--lora-rank=4", "--lora-target-modules=q_proj")  # the same in other words
    (note,) = resume_notes(command.parse(*flags).config)
    assert note.startswith("--lora-load")
    with refused(ConfigError, match="--lora-alpha: got 8.*other adapters"):
        resume_notes(command.parse(*flags, "--lora-alpha=8").config)
    with refused(ConfigError, match=r"adapter_config\.json: cannot be read"):
        command.parse(f"--lora-load={folder}", OUTPUT_BASEPATH=str(command.folder / "new"))


MIB = 2**20


def test_data_that_changed_is_refused_and_equal_data_is_taken(command):
    command.data.write_bytes(bytes(3 * MIB))
    config = _begun(command)
    for place in (0, 3 * MIB // 2 - MIB // 2, 3 * MIB - 1, 3 * MIB):  # in turn: the last is one more byte
        changed = bytearray(3 * MIB + (place == 3 * MIB))
        changed[place] = 1
        command.data.write_bytes(changed)
        remember_data(config, [])  # what the data looked like is not forgotten
        with refused(ConfigError, match=r"position 20 DATASET_PATH.*rows\.json has changed since"):
            resume_notes(config)
    command.data.write_bytes(bytes(3 * MIB))
    os.utime(command.data, (0, 0))  # a copy from elsewhere
    assert resume_notes(config) == []
    moved = command.data.rename(command.folder / "renamed.jsonl")
    (note,) = resume_notes(command.parse(DATASET_PATH=str(moved)).config)
    assert note.endswith(f"DATASET_PATH): {command.data} before, {moved} from here on")


def test_folder_with_one_file_more_is_other_data(command):
    folder = command.folder / "rows"
    folder.mkdir()
    (folder / "a.json").write_text("[1]")
    config = _begun(command, DATASET_PATH=str(folder))
    assert resume_notes(config) == []
    (folder / "b.json").touch()
    with refused(ConfigError, match="/rows has changed since .*number of files"):
        resume_notes(config)


def test_sets_with_weights_of_a_run_that_took_other_turns_are_refused(command, monkeypatch):
    """Earlier versions hashed no rule, because they mixed fine-tuning sets by another one."""
    (command.folder / "b.json").write_text("[1]")
    positions = {"DATASET_PATH": f"0.7 {command.data} 0.3 {command.folder / 'b.json'}"}
    with monkeypatch.context() as earlier:
        earlier.setattr("patch.preflight.data_record._MIXED", "")
        config = _begun(command, **positions)
    with refused(ConfigError, match="has changed since .* the rule by which sets with weights take turns"):
        resume_notes(config)
    assert resume_notes(command.parse("--resume-with-changed-data", **positions).config)


@pytest.mark.parametrize(
    ("name", "chosen", "message"),
    [
        ("tokenizer.json", False, "TOKENIZER_PATH.*: the tokenizer in .*/encoder has changed since"),
        ("chat_template.jinja", False, "TOKENIZER_PATH.*: the chat template in .*/encoder is not the"),
        ("mine.jinja", True, "--chat-template: .*/mine.jinja is not the chat template with which"),
    ],
)
def test_tokenizer_or_template_that_changed_in_place_is_refused(command, name, chosen, message):
    folder = command.folder / "encoder"
    folder.mkdir()
    for file in ("tokenizer.json", "chat_template.jinja", "mine.jinja"):
        (folder / file).write_text("{}")
    command.environ["TOKENIZER_PATH"] = str(folder)
    config = _begun(command, *([f"--chat-template={folder / 'mine.jinja'}"] if chosen else []))
    assert resume_notes(config) == []
    (folder / name).write_text("{ }")
    with refused(ConfigError, match=message):
        resume_notes(config)


def test_tokenizer_and_template_that_moved_are_taken_and_listed(command):
    """The text of a template counts, whether a file is named or the tokenizer has it, in either file."""
    settings = command.tokenizer / "tokenizer_config.json"
    settings.write_text('{"chat_template": "{{ messages }}"}')
    _begun(command)
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
def test_other_tokens_are_refused_with_what_has_changed(command, changes, message):
    config = _begun(command, sets=[SET])
    assert check_tokens(config, [replace(SET, path="moved", origin=SET.origin | changes)]) == []
    with refused(ConfigError, match=message) as caught:
        check_tokens(config, [replace(SET, path="moved", tokens="5" * 64, origin=SET.origin | changes)])
    assert WEIGHTS in str(caught.value)


def test_template_that_writes_the_date_is_named_and_taken(command):
    """The date cannot be set back to the first day of the run; equal sizes show that no sample has moved."""
    dated = replace(SET, reads_clock=True)
    config = _begun(command, sets=[dated])
    (warning,) = check_tokens(config, [replace(dated, tokens="5" * 64)])
    assert "the chat template writes the date" in warning
    with refused(ConfigError, match="something that is not recorded"):
        check_tokens(config, [replace(dated, tokens="5" * 64, sizes="6" * 64)])


def test_damaged_record_is_named_and_none_is_taken(command):
    config, file = _begun(command), command.folder / "out" / "data.json"
    for content in (b"\xff\xfe", b"{", b'{"files": "1"}', b"[]", b'{"sets": [{}]}'):
        file.write_bytes(content)
        with refused(ConfigError, match=r"out/data\.json cannot be read .* remove it to resume without a"):
            resume_notes(config)
    file.unlink()
    assert resume_notes(config) == [] and check_tokens(config, [SET]) == []
    file.mkdir()
    with refused(CheckpointError, match=r"position 25.*data\.json cannot be written: "):
        remember_data(command.parse("--resume-with-changed-data").config, [])


def test_unusable_config_of_the_run_is_named(command):
    config, out = _begun(command), command.folder / "out"
    lacking = ("model: {num_layers: 2}", "lacks hidden_size, .* expected a whole run")
    for text, said in (("model: {", "malformed YAML"), lacking):
        (out / "config.yaml").write_text(text)
        with refused(ConfigError, match=rf"out/config\.yaml: {said}"):
            resume_notes(config)
    (out / "config.yaml").unlink()
    (out / "checkpoint" / "latest_checkpointed_iteration.txt").unlink()  # they are guarded too
    with refused(ConfigError, match=r"config\.yaml is missing, while .* holds checkpoints: .* put it back"):
        resume_notes(config)
