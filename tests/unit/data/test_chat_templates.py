"""The built-in chat templates, chosen ones, and how answers are found with and without marks."""

from pathlib import Path
from typing import Any

import pytest
from chats import chat, turns
from llama3_tokenizer import SPECIAL_TOKENS, tiny_tokenizer
from tokenizer_zoo import qwen_tokenizer, sentencepiece_tokenizer
from transformers import AutoTokenizer

from patch.data.chat_templates import ensure_chat_template, template_name
from patch.data.rendering.chat import ChatRenderer, end_of_turn
from patch.data.rendering.spans import unmarked
from patch.errors import DataError


@pytest.mark.parametrize("name", ["chatml", "llama3", "alpaca", "plain"])
def test_built_in_template_is_named_and_its_prompt_is_the_context(name: str, tokenizer_of: Any) -> None:
    """Its samples are in answers.txt."""
    tokenizer, messages = tokenizer_of(name), turns("hello", "yes")
    assert template_name(tokenizer) == f"the built-in chat template {name}"
    (spans,) = ChatRenderer(tokenizer).render(chat(messages))
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    end = tokenizer.convert_ids_to_tokens(end_of_turn(tokenizer))
    assert [span.text for span in spans] == [prompt, f"yes{end}"]


def test_template_whose_special_tokens_are_missing_is_refused_with_those_that_fit() -> None:
    tokenizer = sentencepiece_tokenizer("legacy")
    with pytest.raises(
        DataError,
        match=r"got chatml, .* no special token <.im_start.> and no <.im_end.>; .*: alpaca, plain, or a .j",
    ) as caught:
        ensure_chat_template(tokenizer, "chatml")
    assert caught.value.field == "chat_template" and tokenizer.chat_template is None
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="no special token eos token"):
        ensure_chat_template(tokenizer, "plain")


def test_file_is_a_template_that_is_saved_with_the_tokenizer(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}\u4f60{{ m.content }}<|eot_id|>{% endfor %}")
    tokenizer = tiny_tokenizer(template="another")
    ensure_chat_template(tokenizer, str(file))
    assert tokenizer.chat_template == file.read_text() and template_name(tokenizer) == "the chat template"
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == file.read_text()
    file.write_bytes(b"\xff")
    for name, said in (
        ("mine.jinja", "cannot be read .*utf-8"),
        ("absent", "cannot be read .* expected chatml, llama3"),
        ("", "cannot be read .*irectory"),
    ):
        with pytest.raises(DataError, match=said) as caught:
            ensure_chat_template(tokenizer, str(tmp_path / name))
        assert caught.value.field == "chat_template"


def test_tokenizer_without_a_template_is_refused_at_the_first_conversation() -> None:
    tokenizer = tiny_tokenizer(special=SPECIAL_TOKENS[:2])
    ensure_chat_template(tokenizer)
    with pytest.raises(DataError, match="has no chat template, .*; choose one .--chat-template") as caught:
        ChatRenderer(tokenizer).render(chat(turns("a", "b")))
    assert caught.value.field == "chat_template"


MARKS = {
    "block around the words": "assistant\n{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>\n",
    "with the end of turn": "assistant\n{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n",
    "with what follows": "assistant\n{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}",
    "with half of the header": "assistant{% generation %}\n{{ m.content }}<|im_end|>\n{% endgeneration %}",
    "with the header": "{% generation %}assistant\n{{ m.content }}<|im_end|>\n{% endgeneration %}",
    "not at all": "assistant\n{{ m.content }}<|im_end|>\n",
}


@pytest.mark.parametrize("prompt", ["{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}", ""])
@pytest.mark.parametrize("marks", MARKS)
def test_wherever_the_marks_stand_the_same_is_learned(marks: str, prompt: str) -> None:
    """With a prompt for generation and without one; then the header is found by two answers."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' }}{% if m.role == 'assistant' %}" + MARKS[marks]
        + "{% else %}"
        "{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + prompt
    )  # fmt: skip
    # transformers' Jinja takes the line break after a block away, as it does for every template.
    template = template.replace("%}\n", "%}{{ '\n' }}")
    (spans,) = ChatRenderer(qwen_tokenizer(template)).render(chat(turns("hello", "yes", "question", "no")))
    assert [unmarked(span.text) for span in spans] == [
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n",
        "yes<|im_end|>",
        "\n<|im_start|>user\nquestion<|im_end|>\n<|im_start|>assistant\n",
        "no<|im_end|>",
    ]
