"""The built-in chat templates, chosen ones, and how answers are found with and without marks."""

from pathlib import Path

import pytest
from chats import chat, turns
from llama3_tokenizer import SPECIAL_TOKENS, tiny_tokenizer
from tokenizer_zoo import qwen_tokenizer, sentencepiece_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from patch.data.chat_templates import ensure_chat_template, template_name
from patch.data.rendering import ChatRenderer, Span, unmarked
from patch.data.rendering.chat import end_of_turn
from patch.errors import DataError

TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {}}}]
CALL = {"type": "function", "function": {"name": "get", "arguments": {"city": "x"}}}
WITH_TOOLS = [
    *turns("hello", system="be brief"),
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "sunny"},
    {"role": "assistant", "content": "yes"},
]
H, E, T = "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"
JSON = '{"type": "function", "function": {"name": "get", "parameters": {}}}'


def with_template(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer that a built-in template suits."""
    tokenizer = {
        "chatml": qwen_tokenizer,
        "llama3": tiny_tokenizer,
        "alpaca": lambda: sentencepiece_tokenizer("legacy"),
        "plain": lambda: sentencepiece_tokenizer("first"),
    }[name]()
    ensure_chat_template(tokenizer, name)
    return tokenizer


def texts(tokenizer: PreTrainedTokenizerFast, messages: list, tools: list | None = None) -> list[str]:
    """The spans of the only sample: context and answer by turns."""
    (spans,) = ChatRenderer(tokenizer).render(chat(messages, tools=tools))
    assert [span.learned for span in spans] == [False, True] * (len(spans) // 2)
    return [unmarked(span.text) for span in spans]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "chatml",
            [
                "<|im_start|>system\nbe brief<|im_end|>\n"
                "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n",
                "yes<|im_end|>",
                "\n<|im_start|>user\nquestion<|im_end|>\n<|im_start|>assistant\n",
                "no<|im_end|>",
            ],
        ),
        (
            "llama3",
            [
                f"<|begin_of_text|>{H}system{E}\n\nbe brief{T}{H}user{E}\n\nhello{T}{H}assistant{E}\n\n",
                f"yes{T}",
                f"{H}user{E}\n\nquestion{T}{H}assistant{E}\n\n",
                f"no{T}",
            ],
        ),
        (
            "alpaca",
            [
                "<s>be brief\n\n### Instruction:\nhello\n\n### Response:\n",
                "yes</s>",
                "\n\n### Instruction:\nquestion\n\n### Response:\n",
                "no</s>",
            ],
        ),
        ("plain", ["<s>be briefhello", "yes</s>", "question", "no</s>"]),
    ],
)  # fmt: skip
def test_built_in_template_writes_what_is_expected_and_learns_the_answers(name: str, expected: list) -> None:
    tokenizer = with_template(name)
    messages = turns("hello", "yes", "question", "no", system="be brief")
    assert texts(tokenizer, messages) == expected
    prompt = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert prompt == expected[0]
    assert template_name(tokenizer) == f"the built-in chat template {name}"
    end = tokenizer.convert_ids_to_tokens(end_of_turn(tokenizer))
    assert expected[1].endswith(end) and end != "yes"


def test_tools_are_written_as_hermes_and_meta_do_and_are_refused_where_a_template_knows_none() -> None:
    call = '<tool_call>\n{"name": "get", "arguments": {"city": "x"}}\n</tool_call>'
    assert texts(with_template("chatml"), WITH_TOOLS, TOOLS) == [
        "<|im_start|>system\nbe brief\n\nFunctions that you can call:\n<tools>\n" + JSON + "\n</tools>\n"
        'To call one, write:\n<tool_call>\n{"name": its name, "arguments": {...}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n",
        f"{call}\n{call}<|im_end|>",
        "\n<|im_start|>tool\n<tool_response>\nsunny\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        "yes<|im_end|>",
    ]
    call = '{"name": "get", "parameters": {"city": "x"}}'
    assert texts(with_template("llama3"), WITH_TOOLS, TOOLS) == [
        f"<|begin_of_text|>{H}system{E}\n\nbe brief\n\nFunctions that you can call:\n{JSON}\n"
        'To call one, answer only with {"name": its name, "parameters": {...}}.'
        f"{T}{H}user{E}\n\nhello{T}{H}assistant{E}\n\n",
        f"{call}; {call}{T}",
        f"{H}ipython{E}\n\nsunny{T}{H}assistant{E}\n\n",
        f"yes{T}",
    ]  # fmt: skip
    for name in ("alpaca", "plain"):
        with pytest.raises(DataError, match=f"the built-in chat template {name} does not write the tools"):
            texts(with_template(name), WITH_TOOLS, TOOLS)


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
    assert texts(qwen_tokenizer(template), turns("hello", "yes", "question", "no")) == [
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n",
        "yes<|im_end|>",
        "\n<|im_start|>user\nquestion<|im_end|>\n<|im_start|>assistant\n",
        "no<|im_end|>",
    ]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "would not learn to stop"),
        (
            "{{ messages | length }}{% for m in messages %}{{ m.content }}<|eot_id|>{% endfor %}",
            "cannot be separated",
        ),
        ("{{ raise_exception('not today') }}", "refuses the conversation: not today"),
        ("{% if %}", "refuses the conversation"),
        (
            "{% for m in messages %}{% generation %}{{ m.content }}<|eot_id|>{% endgeneration %}{% endfor %}",
            "has 2 blocks of generation for 1 answers",
        ),
        (
            "{% for m in messages %}{{ m.content }}{% if m.role != 'user' %}"
            "{% generation %}other<|eot_id|>{% endgeneration %}{% endif %}{% endfor %}",
            "does not write what the assistant says",
        ),
        (
            "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}"
            "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}",
            "ends the assistant's turn without a special token",
        ),
        # Inside a macro transformers counts the characters wrongly.
        (
            "{% macro say(m) %}long text before {% generation %}{{ m.content }}<|eot_id|>{% endgeneration %}"
            "{% endmacro %}{% for m in messages %}"
            "{{ m.content if m.role == 'user' else 'x' ~ say(m) }}{% endfor %}",
            "does not write what the assistant says",
        ),
    ],
)
def test_template_that_cannot_be_trained_with_is_refused_at_once(template: str, said: str) -> None:
    tokenizer = tiny_tokenizer(template=template)
    with pytest.raises(DataError, match=f"^chat template: .*{said}"):
        ChatRenderer(tokenizer).render(chat(turns("hello", "world yes")))
    assert end_of_turn(tokenizer) is None


def test_wordless_answer_is_context_only_and_without_an_answer_there_is_no_sample() -> None:
    renderer = ChatRenderer(with_template("llama3"))
    (spans,) = renderer.render(chat(turns("a", " ", "b", "c")))
    assert spans == [
        Span(f"<|begin_of_text|>{H}user{E}\n\na{T}{H}assistant{E}\n\n{T}", False),
        Span(f"{H}user{E}\n\nb{T}{H}assistant{E}\n\n", False, begins_turn=True),
        Span(f"c{T}", True),
    ]
    assert renderer.render(chat(turns("a"))) == []
