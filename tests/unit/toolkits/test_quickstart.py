"""The quickstart's questions, tokenizer and folder; the training itself is `make quickstart`."""

import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from patch.errors import ConfigError
from toolkits.quickstart.__main__ import launcher_command
from toolkits.quickstart.seed_model import write_model, write_tokenizer
from toolkits.quickstart.tasks import Example, make_examples, number_words, to_row
from toolkits.quickstart.workspace import Workspace, prepare

POSITION_PAD_LEN = 8


@pytest.fixture(scope="module")
def examples() -> tuple[list[Example], list[Example]]:
    return make_examples(num_train=4000, num_held_out=200, seed=1)


@pytest.fixture(scope="module")
def folder(examples: tuple[list[Example], list[Example]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    texts = (text for example in examples[0] for text in (example.question, f"assistant\n\n{example.answer}"))
    write_model(path, write_tokenizer(path, texts), seed=1)
    return path


def test_number_words() -> None:
    words = {1: "one", 20: "twenty", 30017: "thirty thousand seventeen"}
    words |= {42105: "forty-two thousand one hundred five", 99990: "ninety-nine thousand nine hundred ninety"}
    assert {number: number_words(number) for number in words} == words


def test_nothing_held_out_is_in_training(examples: tuple[list[Example], list[Example]]) -> None:
    train, held_out = examples
    assert len(held_out) == 200 and len({example.question for example in held_out}) == 200
    assert not {example.question for example in train} & {example.question for example in held_out}
    for task in ("number", "date", "currency"):
        answers = [{each.answer for each in part if each.task == task} for part in examples]
        assert not answers[0] & answers[1], task


def test_rows_of_every_task_come_in_both_formats(examples: tuple[list[Example], list[Example]]) -> None:
    seen = {(example.task, *to_row(example, index)) for index, example in enumerate(examples[0][:8])}
    assert len(seen) == 8


def test_tokenizer_keeps_digits_apart_and_text_whole(
    folder: Path, examples: tuple[list[Example], list[Example]]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for example in examples[1]:
        ids = tokenizer(example.question, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == example.question
        assert not [token for token in tokenizer.convert_ids_to_tokens(ids) if re.search(r"\d.|.\d", token)]


def test_every_sample_fits_pad_len(folder: Path, examples: tuple[list[Example], list[Example]]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pad_len = int(launcher_command(Workspace(folder), "fp32")[1 + POSITION_PAD_LEN])
    for example in examples[0]:
        turns = [
            {"role": "user", "content": example.question},
            {"role": "assistant", "content": example.answer},
        ]
        assert len(tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"]) <= pad_len


def test_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="no quickstart wrote, so it is not used; expected a new or empty"):
        prepare(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_trained_model_of_an_earlier_quickstart_is_kept(tmp_path: Path) -> None:
    roots = []
    for _ in range(3):
        space, _ = prepare(tmp_path / "out", num_held_out=4, num_train=16)
        roots.append(space.root.name)
        if len(roots) != 2:  # the second one is not trained
            space.trained.mkdir(parents=True)
    assert roots == ["out", "out-2", "out-2"] and (tmp_path / "out" / "run" / "hf").is_dir()
