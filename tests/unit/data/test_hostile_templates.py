"""Chat templates that fail, never end or eat all memory: a DataError that names the template, and soon."""

import json
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from chats import chat
from llama3_tokenizer import build_tiny_tokenizer, tiny_tokenizer
from tokenizers import normalizers

from patch.data.chat_templates import LLAMA3_CHAT_TEMPLATE
from patch.data.formats.turns import PLAIN
from patch.data.rendering.chat import ChatRenderer
from patch.data.sft.source import load_sft
from patch.data.tokenizer import load_tokenizer
from patch.errors import DataError

QUESTION = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "world"}
RECURSIVE = "{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
MARKED = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ m.content }}<|eot_id|>{% endif %}{% endfor %}"
)
# A good template but for one message.
ON_DEMAND = "{% if messages[0].content == 'evil' %}" + ENDLESS + "{% endif %}" + LLAMA3_CHAT_TEMPLATE


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ 1 + 'a' }}", "fails: TypeError: "),
        ("{{ range(10 ** 9) | list }}", "fails: OverflowError: "),
        (RECURSIVE, "fails: RecursionError: "),
        ("{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}", "fails: "),
        ("{% import 'os' as os %}", "fails: "),
        ("{{ messages | attr('__class__') }}{{ [].__class__.__base__ }}", "refuses the conversation: "),
        ("{{ 'x' | center(3 * 10 ** 8) }}", "fails: MemoryError"),
        ("{{ [1] * 10 ** 12 }}", "fails: MemoryError"),
        ("{{ 'x' | center(10 ** 7) }}<|eot_id|>", "writes 10000010 characters, expected at most"),
        ("{{ messages[99].content }}", "refuses the conversation: "),
        ({"tool_use": LLAMA3_CHAT_TEMPLATE}, "fails: ValueError: "),
        (7, "fails: "),
    ],
)
def test_whatever_a_template_raises_is_a_data_error(template, said: str, monkeypatch) -> None:
    monkeypatch.setattr("patch.data.rendering.bounded_process.BYTES", 1 << 27)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(DataError) as caught:
        ChatRenderer(tokenizer).render(chat([QUESTION, ANSWER]))
    assert str(caught.value).startswith("chat template: the chat template ")
    assert said in str(caught.value) and len(str(caught.value)) < 1000


@pytest.mark.timeout(60)
def test_row_that_makes_the_template_endless_is_named_with_the_templates_file(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("patch.data.rendering.bounded_process.SECONDS", 1)
    build_tiny_tokenizer(tmp_path / "tok", template=ON_DEMAND)
    rows = [[QUESTION, ANSWER], [QUESTION, ANSWER], [{"role": "user", "content": "evil"}, ANSWER]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    with pytest.raises(DataError) as caught:
        load_sft(tmp_path / "rows.jsonl", load_tokenizer(str(tmp_path / "tok")), 64)
    place, file = tmp_path / "rows.jsonl", tmp_path / "tok" / "chat_template.jinja"
    assert str(caught.value).startswith(f"{place}: line 3: the chat template in {file}, or ")
    assert ", takes more than 1 s; " in str(caught.value)
    # The number is computed while Jinja compiles, in one call that no signal handler interrupts.
    compiled = ChatRenderer(tiny_tokenizer(template="{{ 10 ** (10 ** 10) }}"))
    with pytest.raises(DataError, match="^row: the chat template, or the tokenizer .* takes more than 1 s;"):
        compiled.render(chat([QUESTION, ANSWER]))


@pytest.mark.timeout(60)
def test_tokenizer_that_takes_too_much_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("patch.data.rendering.bounded_process.BYTES", 1 << 27)
    tokenizer = tiny_tokenizer(template=LLAMA3_CHAT_TEMPLATE)
    growing = [normalizers.Replace("e", "e" * 50) for _ in range(5)]
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(growing)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": [QUESTION, ANSWER]}) + "\n")
    with pytest.raises(DataError, match=r"line 1: .*, or the tokenizer .*, has ended its process"):
        load_sft(tmp_path / "rows.jsonl", tokenizer, 64)


def test_answer_that_is_a_special_token_alone_is_blamed_and_not_the_template() -> None:
    tokenizer = tiny_tokenizer(template=MARKED)
    row = chat([QUESTION, {"role": "assistant", "content": "<|eot_id|>"}])
    with pytest.raises(DataError, match="message 2: the answer is a special token and no words") as told:
        ChatRenderer(tokenizer, replace(PLAIN, allow_special_tokens=True)).render(row)
    assert told.value.field == "allow_special_tokens"


def test_killed_process_is_a_data_error_and_leaves_no_zombie() -> None:
    """As the kernel does for want of memory."""
    before = psutil.Process().children()  # such as the server of processes, whose number may be higher
    killed = []

    def kill() -> None:
        killed.extend(child for child in psutil.Process().children() if child not in before)
        for child in killed:
            child.kill()

    threading.Timer(2, kill).start()
    with pytest.raises(DataError, match="row: the process .* this row was killed, .* memory") as caught:
        ChatRenderer(tiny_tokenizer(template=ENDLESS)).render(chat([QUESTION, ANSWER]))
    assert caught.value.field == "data_workers" and "template" not in str(caught.value)
    assert len(killed) == 1 and not killed[0].is_running()
