"""Where learning begins and ends in a conversation, written by hand for three families of templates."""

import pytest
from chats import chat, turns
from llama3_tokenizer import SPECIAL_TOKENS, tiny_tokenizer

from patch.data.chat_templates import LLAMA3_CHAT_TEMPLATE
from patch.data.rendering import ChatRenderer, Span, unmarked
from patch.data.rendering.chat import end_of_turn
from patch.errors import DataError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }} {{ eos_token }}"
    "{% else %}{{ raise_exception('no system message, please') }}{% endif %}{% endfor %}"
)
B, H, E, T = "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"


def renderer(template: str = LLAMA3_CHAT_TEMPLATE, special: tuple = ()) -> ChatRenderer:
    return ChatRenderer(tiny_tokenizer(template=template, special=[*SPECIAL_TOKENS, *special]))


def test_llama3_header_is_not_learned_and_end_of_turn_is() -> None:
    (spans,) = renderer().render(chat(turns("hello", " world\n", system="be brief")))
    assert spans == [
        Span(f"{B}{H}system{E}\n\nbe brief{T}{H}user{E}\n\nhello{T}{H}assistant{E}\n\n", False),
        Span(f"world{T}", True),
    ]


def test_every_answer_of_several_turns_is_learned_and_a_last_question_left_out() -> None:
    (spans,) = renderer().render(chat(turns("one", "two", "three", "four", "five")))
    assert spans == [
        Span(f"{B}{H}user{E}\n\none{T}{H}assistant{E}\n\n", False),
        Span(f"two{T}", True),
        Span(f"{H}user{E}\n\nthree{T}{H}assistant{E}\n\n", False),
        Span(f"four{T}", True),
    ]


def test_line_break_after_chatmls_end_of_turn_is_not_learned() -> None:
    (spans,) = renderer(CHATML, ("<|im_start|>", "<|im_end|>")).render(chat(turns("a", "b", "c", "d")))
    assert spans == [
        Span("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n", False),
        Span("b<|im_end|>", True),
        Span("\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n", False),
        Span("d<|im_end|>", True),
    ]


def test_llama2_template_without_generation_prompt_learns_up_to_eos() -> None:
    (spans,) = renderer(LLAMA2).render(chat(turns("a", "b")))
    assert spans == [Span(f"{B}[INST] a [/INST]", False), Span(" b <|end_of_text|>", True)]


def test_special_token_within_an_answer_does_not_end_it() -> None:
    (spans,) = renderer().render(chat(turns("a", f"say {T} twice")))
    assert unmarked(spans[1].text) == f"say {T} twice{T}" and spans[1].text.count(T) == 1
    assert renderer().holds_special_token(chat(turns("a", f"say {T} twice")))
    assert not renderer().holds_special_token(chat(turns("a", "say <|eot_i d|>")))


def test_wordless_answer_is_context_only() -> None:
    (spans,) = renderer().render(chat(turns("a", " ", "b", "c")))
    assert spans == [
        Span(f"{B}{H}user{E}\n\na{T}{H}assistant{E}\n\n{T}", False),
        Span(f"{H}user{E}\n\nb{T}{H}assistant{E}\n\n", False, begins_turn=True),
        Span(f"c{T}", True),
    ]


def test_conversation_without_an_answer_is_empty() -> None:
    assert renderer().render(chat(turns("a"))) == []


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
    ],
)
def test_template_that_cannot_be_trained_with_is_refused_at_once(template: str, said: str) -> None:
    with pytest.raises(DataError) as caught:
        renderer(template).render(chat(turns("a", "b")))
    assert str(caught.value).startswith("chat template: ")
    assert said in str(caught.value)


def test_templates_refusal_names_the_row() -> None:
    with pytest.raises(DataError, match="f.json: row 3: .*no system message, please"):
        renderer(LLAMA2).render(chat(turns("a", "b", system="s"), where="f.json: row 3"))


@pytest.mark.parametrize(
    ("template", "token"),
    [
        (LLAMA3_CHAT_TEMPLATE, T),
        (CHATML, "<|im_end|>"),
        (LLAMA2, "<|end_of_text|>"),
        ("{% if %}", None),
        (None, None),
    ],
)
def test_token_that_ends_a_turn_follows_from_the_template(template: str | None, token: str | None) -> None:
    tokenizer = tiny_tokenizer(template=template, special=[*SPECIAL_TOKENS, "<|im_start|>", "<|im_end|>"])
    expected = None if token is None else tokenizer.convert_tokens_to_ids(token)
    assert end_of_turn(tokenizer) == expected
