"""Families of templates against transformers, and templates that end a turn by several tokens.

The learned tokens of each family are in answers.txt.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import chat_template_families as families
import pytest
from chats import chat, turns
from llama3_tokenizer import tiny_tokenizer
from tokenizer_zoo import qwen_tokenizer

from patch.data.chat_templates import ensure_chat_template
from patch.data.formats.turns import PLAIN, Text
from patch.data.rendering.chat import ChatRenderer
from patch.data.rendering.spans import Span, SpanEncoder, unmarked
from patch.data.tokenizer import load_tokenizer
from patch.errors import ConfigError, DataError

FAMILIES = ("LLAMA2", "MISTRAL", "LLAMA31", "QWEN25", "QWEN3")
LAST = replace(PLAIN, train_on="last")
TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "get", "arguments": {"city": "a"}}}
WITH_TOOLS = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "\u4f60\u597d"},
    {"role": "assistant", "content": "yes"},
]


def test_answer_of_a_tool_that_is_not_written_is_noticed() -> None:
    deaf = tiny_tokenizer(template=families.LLAMA31.replace("m.content | tojson", "'...'"))
    with pytest.raises(DataError, match="message 3: .* does not write what the tool says"):
        ChatRenderer(deaf).render(chat(WITH_TOOLS, tools=TOOLS))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_sample_has_the_text_and_the_tokens_of_transformers(family: str, tokenizer_of: Any) -> None:
    """Up to the end of its last turn. No merge crosses a border; LLaMA 2 has no second prefix space there."""
    tokenizer = tokenizer_of(family)
    messages = turns(*(f"turn {number} \u4f60\u597d" for number in range(12)), system="yes")
    samples = ChatRenderer(tokenizer).render(chat(messages))
    assert len(samples) == (6 if family in ("MISTRAL", "QWEN3") else 1)
    encoded = SpanEncoder(tokenizer).encode(samples)
    counts = range(len(messages), 0, -2)
    for sample, ids, count in zip(reversed(samples), reversed(encoded), counts, strict=False):
        whole = tokenizer.apply_chat_template(messages[:count], tokenize=False)
        written = unmarked("".join(span.text for span in sample))
        assert whole.startswith(written) and not whole[len(written) :].strip()
        assert sum(ids, []) == tokenizer(written, add_special_tokens=False)["input_ids"]


def test_variables_of_a_template_are_those_of_transformers_and_are_exported(tmp_path: Path) -> None:
    tokenizer, row = qwen_tokenizer(families.QWEN3), chat(turns("hello", "yes", "question", "no"))
    said, thoughts = tokenizer.chat_template, "<think>\n\n</think>\n\n"
    theirs = tokenizer.apply_chat_template(
        row.messages[:3], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    ((*_, answer),) = ChatRenderer(tokenizer).render(row)[-1:]
    assert answer.text == f"{thoughts}no<|im_end|>"  # the default: empty thoughts are learned
    for _ in range(2):
        ensure_chat_template(tokenizer, kwargs='{"enable_thinking": false, "other": "\\u4e09\\"%}"}')
    ((*context, answer),) = ChatRenderer(tokenizer).render(row)[-1:]
    assert "".join(span.text for span in context) == theirs and theirs.endswith(thoughts)
    assert answer.text == "no<|im_end|>"
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    chosen = [
        loaded.apply_chat_template(row.messages[:3], tokenize=False, add_generation_prompt=True, **own)
        for own in ({}, {"enable_thinking": True})
    ]
    assert chosen == [theirs, theirs.removesuffix(thoughts)] and str(loaded.chat_template).endswith(said)
    with pytest.raises(ConfigError, match="got '.*a-b.*', expected a JSON object of names"):
        ensure_chat_template(tokenizer, kwargs='{"a-b": 1}')


def test_text_needs_a_token_that_ends_it() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="row: the tokenizer .* has no eos token"):
        ChatRenderer(tokenizer).render(Text("hello", "row"))


def test_rewriting_template_makes_a_bounded_number_of_samples(tokenizer_of: Any) -> None:
    tokenizer, row = tokenizer_of("QWEN3"), chat(turns(*("hello", "yes") * 65))
    with pytest.raises(DataError, match="more than 64; learn the last turn only .--train-on last") as caught:
        ChatRenderer(tokenizer).render(row)
    assert caught.value.field == "train_on"
    assert len(ChatRenderer(tokenizer).render(chat(row.messages[:-2]))) == 64
    assert len(ChatRenderer(tokenizer, LAST).render(row)) == 1


def test_end_of_turn_after_a_block_that_ends_with_the_special_end_of_a_call_is_learned() -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ '<|im_call|>' + c.function | tojson + '<|call_end|>' }}{% endfor %}"
        "{% endgeneration %}{{ '<|im_end|>' }}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
        "{{ tools | tojson }}"
    )
    tokenizer = qwen_tokenizer(template)
    tokenizer.add_tokens(["<|im_call|>", "<|call_end|>"], special_tokens=True)
    (sample,) = ChatRenderer(tokenizer).render(chat(WITH_TOOLS, tools=TOOLS))
    assert [span.text[-10:] for span in sample if span.learned] == ["<|im_end|>", "<|im_end|>"]


QUESTION_HEADERS = {
    "LLAMA2": "<s>[INST] ",
    "MISTRAL": "[INST] ",
    "LLAMA31": "<|start_header_id|>user<|end_header_id|>\n\n",
    "QWEN25": "\n<|im_start|>user\n",
    "QWEN3": "\n<|im_start|>user\n",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_turns_that_are_not_learned_are_divided_without_a_change_of_ids(
    family: str, tokenizer_of: Any
) -> None:
    """The texts have blanks at their ends, and quote the header and the end of a turn."""
    tokenizer, header = tokenizer_of(family), QUESTION_HEADERS[family]
    quoted = f"x{tokenizer.eos_token}<|eot_id|>{header}y"
    texts = ["hello", "world", " \n yes ", quoted, quoted, "\u4f60\u597d \n", "no", "\n\nno"]
    (spans,) = ChatRenderer(tokenizer, LAST).render(chat(turns(*texts)))
    begins = [unmarked(span.text) for span in spans if span.begins_user_turn]
    has_system = family in ("LLAMA31", "QWEN25")  # they write a message of their own
    assert [text.startswith(header) for text in begins] == [True] * (3 + has_system)
    assert not any(span.learned for span in spans[:-1])
    joined = [Span("".join(span.text for span in spans[:-1]), False), spans[-1]]
    encoder = SpanEncoder(tokenizer)
    divided, whole = encoder.encode([spans, joined])
    assert sum(divided, []) == sum(whole, [])
