"""The exact learned tokens for five families of templates, written by hand.

Each run of learned tokens stands after the token before it. In sentencepiece's tokens a blank is \u2581, in
those of byte-level tokenizers it is \u0120, and a line break is \u010a.
"""

from functools import cache
from pathlib import Path

import chat_template_families as families
import pytest
from chats import chat, turns
from llama3_tokenizer import tiny_tokenizer
from tokenizer_zoo import qwen_tokenizer, sentencepiece_tokenizer
from transformers import PreTrainedTokenizerFast

from patch.data.chat_templates import ensure_chat_template
from patch.data.formats import Conversation, Text
from patch.data.rendering import ChatRenderer, RenderOptions, Span, SpanEncoder, unmarked
from patch.data.rendering.chat import end_of_turn
from patch.data.tokenizer import load_tokenizer
from patch.errors import ConfigError, DataError

FAMILIES = ("LLAMA2", "MISTRAL", "LLAMA31", "QWEN25", "QWEN3")
TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}]
LAST = RenderOptions(train_on="last")


def call(city: str) -> dict:
    return {"type": "function", "function": {"name": "get", "arguments": {"city": city}}}


WITH_TOOLS = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": None, "tool_calls": [call("a")]},
    {"role": "tool", "content": "\u4f60\u597d"},
    {"role": "assistant", "content": "yes"},
]


@cache
def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    template = getattr(families, family)
    if family == "LLAMA2":
        return sentencepiece_tokenizer("legacy", template)
    if family == "MISTRAL":
        return sentencepiece_tokenizer("first", template, families.MISTRAL_TOKENS)
    return tiny_tokenizer(template=template) if family == "LLAMA31" else qwen_tokenizer(template)


def learned(family: str, row: Conversation | Text, options: RenderOptions | None = None) -> list[list[str]]:
    """For each sample its runs of learned tokens: `token before > learned tokens`, separated by blanks."""
    tokenizer = tokenizer_of(family)
    samples = ChatRenderer(tokenizer, options).render(row)
    runs: list[list[str]] = []
    for sample, ids in zip(samples, SpanEncoder(tokenizer).encode(samples), strict=True):
        runs.append([])
        last = ""
        for span, part in zip(sample, ids, strict=True):
            tokens = tokenizer.convert_ids_to_tokens(part)
            if span.learned:
                runs[-1].append(" ".join([last, ">", *tokens]))
            last = tokens[-1]
    return runs


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        # The blank before the words is the words', and the template has another one before the end.
        (
            "LLAMA2",
            [["[/INST] > \u2581wo r l d \u2581 </s>",
              "\u2581question\u2581[/INST] > \u2581answer \u2581 </s>"]],
        ),
        # The system message wanders to the last question, so the first turn is a sample of its own.
        (
            "MISTRAL",
            [["[/INST] > \u2581wo r l d </s>"], ["[/INST] > \u2581answ er </s>"]],
        ),
        ("LLAMA31", [["\u010a\u010a > world <|eot_id|>", "\u010a\u010a > answer <|eot_id|>"]]),
        ("QWEN25", [["\u010a > world <|im_end|>", "\u010a > answer <|im_end|>"]]),
        # The empty thoughts of the last answer are dropped once another question follows.
        (
            "QWEN3",
            [
                ["\u010a > <think> \u010a\u010a </think> \u010a \u010a world <|im_end|>"],
                ["\u010a > <think> \u010a\u010a </think> \u010a \u010a answer <|im_end|>"],
            ],
        ),
    ],
)  # fmt: skip
def test_system_message_and_two_turns(family: str, expected: list[list[str]]) -> None:
    row = chat(turns("hello", "world", "question", "answer", system="yes"))
    assert learned(family, row) == expected
    assert learned(family, row, LAST) == [[expected[-1][-1]]]
    only_first = chat(row.messages, learned=(True, True, True, True, False))
    assert learned(family, only_first) == [[expected[0][0]]]


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        (
            "MISTRAL",
            [["[/INST] > [TOOL_CALLS] \u2581 [ <0x7B> <0x22> n a m e <0x22> <0x3A> \u2581 <0x22> g e t "
              "<0x22> <0x2C> \u2581 <0x22> a r g u m e n t s <0x22> <0x3A> \u2581 <0x7B> <0x22> c i t y "
              "<0x22> <0x3A> \u2581 <0x22> a <0x22> <0x7D> <0x7D> ] </s>",
              "[/TOOL_RESULTS] > \u2581yes </s>"]],
        ),
        (
            "LLAMA31",
            [['\u010a\u010a > { " n a m e " : \u0120 " g e t " , \u0120 " p a r a m e t er s " : \u0120 { '
              '" c i t y " : \u0120 " a " } } <|eot_id|>',
              "\u010a\u010a > yes <|eot_id|>"]],
        ),
        (
            "QWEN25",
            [['\u010a > <tool_call> \u010a { " n a m e " : \u0120 " g e t " , \u0120 " a r g u m e n t s " : '
              '\u0120 { " c i t y " : \u0120 " a " } } \u010a </tool_call> <|im_end|>',
              "\u010a > yes <|im_end|>"]],
        ),
    ],
)  # fmt: skip
def test_calls_of_tools_are_learned_and_their_answers_are_not(family: str, expected: list[list[str]]) -> None:
    assert learned(family, chat(WITH_TOOLS, tools=TOOLS)) == expected
    assert learned(family, chat(WITH_TOOLS, tools=TOOLS), LAST) == expected  # all that follows the question


def test_thoughts_are_learned_with_the_answer_that_has_them() -> None:
    """Between calls of tools Qwen 3 keeps them; after the next question it drops them."""
    thinking = [{**message} for message in WITH_TOOLS]
    thinking[1]["reasoning_content"] = "hello"
    thinking[3]["content"] = "<think>\nworld\n</think>\n\nyes"
    call_text = "> <think> \u010a hello \u010a </think> \u010a\u010a <tool_call>"
    answer = "\u010a > <think> \u010a world \u010a </think> \u010a \u010a yes <|im_end|>"
    ((first, second),) = learned("QWEN3", chat(thinking, tools=TOOLS))
    assert call_text in first and second == answer
    more = [*thinking, *turns("hello", "no")]
    (first_runs, second_runs) = learned("QWEN3", chat(more, tools=TOOLS))
    assert first_runs == [first, second]
    assert second_runs == ["\u010a > <think> \u010a\u010a </think> \u010a \u010a no <|im_end|>"]


@pytest.mark.parametrize(
    ("family", "row", "said"),
    [
        ("LLAMA2", chat(WITH_TOOLS[:2], tools=TOOLS), "message 2: .* not write a call of a tool .'get'"),
        ("LLAMA2", chat(turns("hello", "yes"), tools=TOOLS), "the chat template does not write the tools"),
        (
            "LLAMA31",
            chat([WITH_TOOLS[0], {**WITH_TOOLS[1], "content": "I look"}], tools=TOOLS),
            "message 2: the chat template does not write what the assistant says .'I look'.; use a chat temp",
        ),
        (
            "QWEN25",
            chat([WITH_TOOLS[0], {"role": "assistant", "content": "yes", "reasoning_content": "hm"}]),
            "does not write what the assistant thinks .'hm'",
        ),
    ],
)  # fmt: skip
def test_what_a_template_does_not_write_is_noticed(family: str, row: Conversation, said: str) -> None:
    with pytest.raises(DataError, match=said) as caught:
        learned(family, row)
    assert caught.value.field == "chat_template"


def test_answer_of_a_tool_that_is_not_written_is_noticed() -> None:
    quoted = [*WITH_TOOLS[:2], {"role": "tool", "content": 'say "hi"'}, WITH_TOOLS[3]]
    assert learned("LLAMA31", chat(quoted, tools=TOOLS)) == learned("LLAMA31", chat(WITH_TOOLS, tools=TOOLS))
    deaf = tiny_tokenizer(template=families.LLAMA31.replace("m.content | tojson", "'...'"))
    with pytest.raises(DataError, match="message 3: .* does not write what the tool says"):
        ChatRenderer(deaf).render(chat(WITH_TOOLS, tools=TOOLS))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_sample_has_the_text_and_the_tokens_of_transformers(family: str) -> None:
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


@pytest.mark.parametrize("family", FAMILIES)
def test_quoted_end_of_turn_ends_nothing(family: str) -> None:
    """The same runs as without it, but for the words of the quote."""
    tokenizer = tokenizer_of(family)
    token = tokenizer.convert_ids_to_tokens(end_of_turn(tokenizer))
    quoted = learned(family, chat(turns(f"hello {token}", f"world {token} yes", "question", "answer")))
    assert sum(run.count(token) for runs in quoted for run in runs) == 2
    allowed = RenderOptions(allow_special_tokens=True)
    meant = ChatRenderer(tokenizer, allowed).render(chat(turns("hello", f"world {token} yes")))
    ((_, answer),) = SpanEncoder(tokenizer, allow_special_tokens=True).encode(meant)
    assert answer.count(tokenizer.convert_tokens_to_ids(token)) == 2


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("LLAMA2", [["<s> > \u2581hello \u2581wo r l d </s>"]]),
        ("LLAMA31", [["<|begin_of_text|> > hello \u0120 world <|end_of_text|>"]]),
        ("QWEN25", [[" > hello \u0120 world <|im_end|>"]]),
    ],
)
def test_text_alone_is_learned_from_bos_to_eos(family: str, expected: list[list[str]]) -> None:
    got = learned(family, Text("hello world", "row"))
    assert [[run.replace("\u2581he ll o", "\u2581hello") for run in runs] for runs in got] == expected
    assert learned(family, Text(" \n", "row")) == []
    tokenizer = tokenizer_of(family)
    render, begin, end = ChatRenderer(tokenizer).render, expected[0][0].split(" > ")[0], tokenizer.eos_token
    for prompt in (None, "hello"):  # a text that spells out the two tokens gets no second ones
        bare = Text("hello world", "row", prompt)
        own = Text(f"{begin if prompt is None else ''}hello world{end}", "row", prompt and f"{begin}hello")
        assert render(own) == render(bare)


def test_variables_of_a_template_are_those_of_transformers_and_are_exported(tmp_path: Path) -> None:
    tokenizer, row = tokenizer_of("QWEN3"), chat(turns("hello", "yes", "question", "no"))
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


def test_rewriting_template_makes_a_bounded_number_of_samples() -> None:
    row = chat(turns(*("hello", "yes") * 65))
    with pytest.raises(DataError, match="more than 64; learn the last turn only .--train-on last") as caught:
        learned("QWEN3", row)
    assert caught.value.field == "train_on"
    assert len(learned("QWEN3", chat(row.messages[:-2]))) == 64
    assert len(learned("QWEN3", row, LAST)) == 1


_TURN = "{{ '<|im_start|>' + m.role + '\n' }}"
_TWO_TOKENS = (
    "{% for m in messages %}" + _TURN + "{{ m.content }}"
    "{{ '<|endoftext|><|im_end|>' if m.role == 'assistant' else '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TWO_AFTER_BLOCK = (
    "{% for m in messages %}" + _TURN + "{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|endoftext|>' }}{% endgeneration %}{{ '<|im_end|>' }}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
)
_END_OF_ALL = (
    "{% for m in messages %}" + _TURN + "{{ m.content + '<|im_end|>' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' if add_generation_prompt else '<|endoftext|>' }}"
)


@pytest.mark.parametrize(
    ("template", "ending"),
    [
        (_TWO_TOKENS, ["<|endoftext|>", "<|im_end|>"]),
        (_TWO_AFTER_BLOCK, ["<|endoftext|>", "<|im_end|>"]),
        (_END_OF_ALL, ["<|im_end|>"]),
    ],
)
def test_all_tokens_that_end_a_turn_are_learned(template: str, ending: list[str]) -> None:
    """As Command R7B has two; but not what is written once, after the whole conversation."""
    tokenizer = qwen_tokenizer(template)
    (sample,) = ChatRenderer(tokenizer).render(chat(turns("hello", "yes", "question", "no")))
    (ids,) = SpanEncoder(tokenizer).encode([sample])
    answers = [part for span, part in zip(sample, ids, strict=True) if span.learned]
    assert [tokenizer.convert_ids_to_tokens(part[-len(ending) :]) for part in answers] == [ending, ending]
    assert tokenizer.convert_ids_to_tokens(end_of_turn(tokenizer)) == "<|im_end|>"


def test_end_of_turn_after_a_block_that_ends_with_the_special_end_of_a_call_is_learned() -> None:
    template = (
        "{% for m in messages %}" + _TURN + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ '<|im_call|>' + c.function | tojson + '<|call_end|>' }}"
        "{% endfor %}{% endgeneration %}{{ '<|im_end|>' }}"
        "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}{{ tools | tojson }}"
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
def test_turns_that_are_not_learned_are_divided_without_a_change_of_ids(family: str) -> None:
    """The texts have blanks at their ends, and quote the header and the end of a turn."""
    tokenizer, header = tokenizer_of(family), QUESTION_HEADERS[family]
    quoted = f"x{tokenizer.eos_token}<|eot_id|>{header}y"
    texts = ["hello", "world", " \n yes ", quoted, quoted, "\u4f60\u597d \n", "no", "\n\nno"]
    (spans,) = ChatRenderer(tokenizer, LAST).render(chat(turns(*texts)))
    begins = [unmarked(span.text) for span in spans if span.begins_turn]
    has_system = family in ("LLAMA31", "QWEN25")  # they write a message of their own
    assert [text.startswith(header) for text in begins] == [True] * (3 + has_system)
    assert not any(span.learned for span in spans[:-1])
    joined = [Span("".join(span.text for span in spans[:-1]), False), spans[-1]]
    encoder = SpanEncoder(tokenizer)
    divided, whole = encoder.encode([spans, joined])
    assert sum(divided, []) == sum(whole, [])
