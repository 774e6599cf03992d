"""A resumed run of rows: tokens that have changed are refused; paths and spellings that have are taken."""

import json
import shutil
from pathlib import Path

import pytest
from distributed_runner import run_distributed
from llama3_tokenizer import build_tiny_tokenizer
from small_runs import small_run

from patch.config.schema import RunConfig
from patch.errors import ConfigError
from patch.preflight.resume_guard import resume_notes
from patch.training import run


def config_of(folder: Path, steps: int, **changes: object) -> RunConfig:
    return small_run(
        vocab_size=400, output_path=str(folder / "out"), cache_dir=str(folder / "cache"), train_iters=steps,
        **{
            "tokenizer_name_or_path": str(folder / "tokenizer"), "columns": "instruction=asked,output=said",
            "train_data_path": f"{folder / 'rows.json'}", "save_interval": 1, "lr_warmup_iters": 0,
        } | changes,
    )  # fmt: skip


def train(rank: int, world_size: int, config: RunConfig) -> list[str]:
    """As launcher and worker do: the notes of the resume."""
    notes = resume_notes(config)
    run(config)
    return notes


def refusal(rank: int, world_size: int, config: RunConfig) -> str:
    assert resume_notes(config), "the launcher sees no data that has changed, only another length"
    with pytest.raises(ConfigError) as caught:
        run(config)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step."""
    folder = tmp_path_factory.mktemp("run")
    build_tiny_tokenizer(folder / "tokenizer")
    rows = [{"asked": f"question {i}", "said": "answer " * (i % 3 + 1)} for i in range(9)]
    (folder / "rows.json").write_text(json.dumps(rows))
    run_distributed(train, 1, config_of(folder, 1))
    return folder


@pytest.fixture
def folder(begun: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(begun, tmp_path / "run"))


def test_tokens_that_changed_are_refused_by_the_worker(folder: Path) -> None:
    """The template writes another begin-of-text token: neither its text nor tokenizer.json has changed."""
    file = folder / "tokenizer" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"bos_token": "<|step_id|>"}))
    (message,) = run_distributed(refusal, 1, config_of(folder, 2))
    assert f"{folder / 'rows.json'}: its tokens are not those with which the run in" in message
    assert "what has changed: the tokenizer; expected the same samples" in message
    assert "this folder as position 22" in message


def test_equal_content_elsewhere_and_in_other_words_is_resumed(folder: Path) -> None:
    for name in ("tokenizer", "rows.json", "cache"):
        (folder / name).rename(folder / f"moved {name}")
    changes = {
        "tokenizer_name_or_path": str(folder / "moved tokenizer"),
        "train_data_path": str(folder / "moved rows.json"),
        "chat_template": "llama3",  # the default has chosen it
        "columns": "output=said, instruction=asked",
    }
    (notes,) = run_distributed(train, 1, config_of(folder, 2, **changes))
    assert {note.split(" ")[0] for note in notes} >= {"--chat-template:", "--columns:", "--train-data-path"}
    lines = (folder / "out" / "log" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [1, 2]


def test_template_whose_tokens_are_others_is_refused(folder: Path) -> None:
    """The default was llama3; whether a text is the same is known when the rows are tokens."""
    (folder / "mine.jinja").write_text(
        "{% for m in messages %}{{ m.role + ': ' + m.content + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    config = config_of(folder, 2, chat_template=str(folder / "mine.jinja"))
    (message,) = run_distributed(refusal, 1, config)
    assert "what has changed: the chat template; expected" in message
