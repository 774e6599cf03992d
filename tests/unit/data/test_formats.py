"""Rows of every supported format against hand-written conversations, and what is said about the others."""

import json
from pathlib import Path

import pytest
import torch
from llama3_tokenizer import tiny_tokenizer

from patch.data.formats import Conversation, FormatOptions, Text, to_conversation
from patch.data.sft.source import load_sft
from patch.errors import DataError

WHERE = "f.json: row 9"


def system(text: str) -> dict:
    return {"role": "system", "content": text}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


def says(role: str, text: str) -> dict:
    return {"from": role, "value": text}


def call(name: str, arguments: dict | str, **more: str) -> dict:
    return {"type": "function", **more, "function": {"name": name, "arguments": arguments}}


def calling(*calls: dict) -> dict:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


def tool(name: str) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": {}}}


def converted(row: dict, **options) -> Conversation:
    conversation = to_conversation(row, WHERE, FormatOptions(**options))
    assert isinstance(conversation, Conversation) and conversation.where == WHERE
    assert len(conversation.learned) == len(conversation.messages)
    return conversation


def part(kind: str, value: object) -> dict:
    return {"type": kind, "value": value if isinstance(value, str) else json.dumps(value)}


def turn(role: str, *parts: object, **more: object) -> dict:
    return {"role": role, "content": list(parts), **more}


QA = [user("Q"), assistant("A")]
TOOLS = [{"name": "f", "parameters": {}}, {"name": "g", "parameters": {}}]
CALLS = [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]


def after_q(message: dict) -> dict:
    return {"messages": [user("Q"), message]}


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        # alpaca
        ({"instruction": "I", "input": " \n", "output": "O"}, [user("I"), assistant("O")]),
        ({"instruction": "I", "input": "X", "output": "O"}, [user("I\nX"), assistant("O")]),
        ({"instruction": "", "input": "X", "output": "O"}, [user("X"), assistant("O")]),
        ({"instruction": "I", "output": "O", "text": "I and O"}, [user("I"), assistant("O")]),
        # Keys that only look like ours.
        ({"instruction": "Q", "inputs": None, "imput": [], "input_tokens": 3, "output": "A"}, QA),
        # query and response, Pai's names
        ({"query": "Q", "content": "A", "id": 7}, QA),
        ({"system_prompt": "S", "query": "Q", "response": "A"}, [system("S"), *QA]),
        # prompt and completion
        ({"prompt": "Q", "completion": "A"}, QA),
        ({"prompt": "Q", "completion": [assistant("A")]}, QA),
        # ShareGPT
        ({"conversations": [says("User", "Q"), says("ASSISTANT", "A")]}, QA),
        ({"conversations": [{"role": "human", "value": "Q"}, {"from": "bot", "content": "A"}]}, QA),
        ({"conversations": [says("system", "S"), says("human", "Q"), says("gpt", "A")]}, [system("S"), *QA]),
        ({"conversation": [{"human": "Q", "assistant": "A"}, {"human": "R"}]}, [*QA, user("R")]),
        # OpenAI
        ({"messages": json.dumps(QA)}, QA),
        ({"messages": [json.dumps(message) for message in QA]}, QA),
        ({"messages": [system("S"), *QA, user("R")], "instruction": "-"}, [system("S"), *QA, user("R")]),
        ({"messages": [{**user("Q"), "name": "Ann", "tool_calls": []}]}, [{**user("Q"), "name": "Ann"}]),
        (
            {"messages": [user("Q"), {**assistant("A"), "reasoning_content": "R", "name": None}]},
            [user("Q"), {**assistant("A"), "reasoning_content": "R"}],
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "Q1 ", "image_url": None}, "Q2"]},
                    {"role": "assistant", "content": [{"type": "text", "text": "A"}]},
                ]
            },
            [user("Q1 Q2"), assistant("A")],
        ),
        ({"messages": [system("S"), *QA], "system": "S"}, [system("S"), *QA]),
        # A file of mixed rows: each row has the keys of all formats.
        ({"messages": None, "text": None, "instruction": "Q", "input": None, "output": "A"}, QA),
        ({"messages": [], "conversations": None, "prompt": "Q", "completion": "A"}, QA),
    ],
)  # fmt: skip
def test_row_becomes_conversation(row: dict, messages: list) -> None:
    conversation = converted(row)
    assert conversation.messages == messages
    assert conversation.tools is None
    assert conversation.learned == tuple(message["role"] == "assistant" for message in messages)


def test_text_row_is_learned_as_a_whole() -> None:
    for row in (
        {"text": "T"},
        {"text": "T", "meta": {"url": "u"}, "label": True},
        {"messages": None, "text": "T"},
    ):
        assert to_conversation(row, WHERE) == Text("T", WHERE)


def test_only_the_completion_is_learned() -> None:
    row = {"prompt": [*QA, user("R")], "completion": [assistant("B"), user("S"), assistant("C")]}
    conversation = converted(row)
    assert conversation.messages == [*QA, user("R"), assistant("B"), user("S"), assistant("C")]
    assert conversation.learned == (False, False, False, True, False, True)


@pytest.mark.parametrize("key", ["weight", "train", "loss", "loss_scale", "loss_weight"])
@pytest.mark.parametrize(("no", "yes"), [(0, 1), (False, True), (0.0, 1.0), (0, None)])
def test_a_message_says_whether_it_is_learned(key: str, no: object, yes: object) -> None:
    turns = [user("Q"), {**assistant("A"), key: no}, {**user("R"), key: yes}, {**assistant("B"), key: yes}]
    conversation = converted({"messages": turns})
    assert conversation.messages == [*QA, user("R"), assistant("B")]
    assert conversation.learned == (False, False, False, True)


def test_an_answer_without_words_is_context() -> None:
    thinks = {**assistant(""), "reasoning_content": "hm"}
    conversation = converted({"messages": [user("Q"), assistant(" \n"), user("R"), thinks, assistant("A")]})
    assert conversation.learned == (False, False, False, True, True)
    assert converted({"instruction": "I", "output": "  "}).learned == (False, False)


@pytest.mark.parametrize(
    "tools",
    [
        {"tools": TOOLS},
        {"tools": json.dumps(TOOLS)},
        {"tools": [json.dumps(each) for each in TOOLS]},
        {"tools": [tool("f"), tool("g")]},
        {"tools": [{"function": each} for each in TOOLS]},
        {"functions": TOOLS},
        {"functions": TOOLS, "tools": []},
    ],
)
def test_tools_have_one_form(tools: dict) -> None:
    assert converted({"messages": QA, **tools}).tools == [tool("f"), tool("g")]
    assert converted({"instruction": "Q", "output": "A", **tools}).tools == [tool("f"), tool("g")]


def test_parts_are_words_thoughts_calls_and_tools() -> None:
    thinks = [part("reasoning", "R"), part("text", "B"), *(part("tool_call", each) for each in CALLS)]
    turns = [
        turn("system", part("text", "S"), part("tools", TOOLS), loss_weight=0.0),
        turn("user", part("text", "Q"), loss_weight=0.0),
        turn("assistant", part("text", "A"), loss_weight=0.0),
        turn("user", part("text", "R"), loss_weight=0.0),
        turn("assistant", *thinks, loss_weight=1.0),
        turn("tool", part("text", "[1]"), loss_weight=0.0),
        turn("assistant", part("tool_calls", CALLS), loss_weight=1.0),
    ]
    conversation = converted({"messages": turns, "extra_info": ""})
    calls = [call("f", {"x": 1}), call("g", {})]
    assert conversation.messages == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "R"},
        {"role": "assistant", "content": "B", "reasoning_content": "R", "tool_calls": calls},
        {"role": "tool", "content": "[1]"},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    assert conversation.learned == (False, False, False, False, True, False, True)
    assert conversation.tools == [tool("f"), tool("g")]
    # A system message of tools alone says nothing; and tools may stand beside the messages instead.
    turns[0]["content"].pop(0)
    assert converted({"messages": turns}).messages == conversation.messages[1:]
    assert converted({"messages": turns[1:], "tools": json.dumps(TOOLS)}).tools == conversation.tools
    assert converted({"prompt": turns[:2], "completion": turns[4:]}).tools == conversation.tools


ARGUMENTS = {"z": 1, "a": {"unit": None, "\u4e16": ["x"]}}


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({"content": None, "tool_calls": [call("f", ARGUMENTS)]}, calling(call("f", ARGUMENTS))),
        ({"tool_calls": [call("f", json.dumps(ARGUMENTS), id="c1")]}, calling(call("f", ARGUMENTS, id="c1"))),
        ({"tool_calls": [{"name": "f", "arguments": ARGUMENTS}]}, calling(call("f", ARGUMENTS))),
        ({"tool_calls": json.dumps([call("f", "{}"), call("g", "")])}, calling(call("f", {}), call("g", {}))),
        ({"tool_calls": [call("f", "not JSON")]}, calling(call("f", "not JSON"))),
        ({"content": None, "function_call": {"name": "f", "arguments": "{}"}}, calling(call("f", {}))),
        (
            {"content": [part("text", "See."), part("tool_call", CALLS[1])], "tool_calls": [call("f", {})]},
            {**calling(call("f", {}), call("g", {})), "content": "See."},
        ),
    ],
)
def test_tool_calls_have_one_form(turn: dict, message: dict) -> None:
    result = {"role": "tool", "content": "[1]", "tool_call_id": "c1"}
    row = {"messages": [user("Q"), {"role": "assistant", **turn}, result, assistant("A")]}
    conversation = converted(row)
    assert conversation.messages == [user("Q"), message, result, assistant("A")]
    assert conversation.learned == (False, True, False, True)
    arguments = conversation.messages[1]["tool_calls"][0]["function"]["arguments"]
    assert arguments != ARGUMENTS or list(arguments) == list(ARGUMENTS)


def test_turns_of_calls_and_results_become_tool_messages() -> None:
    calls = [{"name": "f", "arguments": ARGUMENTS}, {"name": "g", "arguments": {}}]
    turns = [says("human", "Q"), says("function_call", json.dumps(calls)), says("observation", '{"n": 1}')]
    turns += [
        {"from": "tool", "value": {"n": "\u4e16"}},
        says("tool_call", json.dumps(calls[1])),
        says("gpt", "A"),
    ]
    assert converted({"conversations": turns}).messages == [
        user("Q"),
        calling(call("f", ARGUMENTS), call("g", {})),
        {"role": "tool", "content": '{"n": 1}'},
        {"role": "tool", "content": '{"n": "\u4e16"}'},
        calling(call("g", {})),
        assistant("A"),
    ]  # fmt: skip


def test_columns_name_the_rows_keys() -> None:
    row = {"question": "Q", "answer": "A", "text": "other", "messages": [user("other")]}
    assert converted(row, columns={"instruction": "question", "output": "answer"}).messages == QA
    assert converted({"a": "Q", "output": "A", "text": "other"}, columns={"prompt": "a"}).messages == QA
    # One name may be another's: the rows' `input` is the instruction.
    swapped = {"instruction": "input", "input": "instruction"}
    row = {"instruction": "X", "input": "Q", "output": "A"}
    assert converted(row, columns=swapped).messages == [user("Q\nX"), assistant("A")]
    assert converted(row, columns=swapped, alpaca_input_join="empty").messages == [user("QX"), assistant("A")]
    turns = [{"speaker": "human", "utterance": "Q"}, {"speaker": "bot", "utterance": "A"}]
    row = {"dialog": turns, "role": 3}
    names = {"messages": "dialog", "role": "speaker", "content": "utterance"}
    assert converted(row, columns=names).messages == QA
    turns += [{"speaker": "bot", "tool_calls": [call("f", {})]}]
    assert converted(row, columns=names).messages == [*QA, calling(call("f", {}))]
    options = FormatOptions(columns={"text": "content"})
    assert to_conversation({"content": "T"}, WHERE, options) == Text("T", WHERE)


def test_rows_of_another_shape_need_no_columns() -> None:
    """One map serves a blend of files, and the validation set."""
    names = {"instruction": "question", "output": "answer", "system": "persona"}
    row = {"question": "Q", "answer": "A", "persona": "S"}
    assert converted(row, columns=names).messages == [system("S"), *QA]
    assert converted({"instruction": "Q", "output": "A"}, columns=names).messages == QA
    assert converted({"messages": QA}, columns=names).messages == QA
    assert converted({"messages": QA}, columns={"content": "utterance", "role": "speaker"}).messages == QA


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"instructoin": "I", "output": "O"}, "found the keys instructoin, output; expected messages"),
        ({"instruction": "I", "ouput": "O"}, "ouput, did you mean output?"),
        ({"instruction": "I", "imput": "X", "output": "O"}, "key imput is unknown, did you mean input?"),
        ({"question": "Q", "answer": "A"}, "--columns instruction=question,output=answer"),
        ({}, "found the keys none"),
        ({"instruction": "I", "output": None}, "output: got null, expected text (where nothing is"),
        ({"instruction": "I", "input": ["X"], "output": "O"}, "input: got ['X'], expected text"),
        ({"prompt": [user("Q")], "input": "X", "completion": "O"}, "prompt: got [{'role'"),
        ({"instruction": "I", "output": "O", "history": [["a", "b"], ["a"]]}, "history: 2: got ['a'], exp"),
        ({"messages": ["hello"]}, "messages: got ['hello'], expected a list of objects"),
        ({"messages": [system("S"), assistant("A")]}, "assistant speaks first, expected the user"),
        (after_q({"role": "asistant", "content": "A"}), "did you mean assistant?"),
        ({"conversations": [says("humann", "A")]}, "message 1: from: got 'humann', expected one of"),
        (after_q({"role": "assistant", "contnt": "A"}), "contnt, did you mean content?"),
        (after_q({"content": "A"}), "message 2: found the keys content; expected role"),
        (after_q({"speaker": "user", "text": "a"}), "--columns role=speaker,content=text"),
        (after_q({"role": "assistant", "content": None}), "message 2: content: got null"),
        (after_q({**user("Q"), "images": ["a.png"]}), "message 2: key images is not supported"),
        (after_q({**assistant("A"), "weight": 0.5}), "message 2: weight: got 0.5, expected 0, 1"),
        (after_q({**assistant(""), "tool_calls": [{}]}), "message 2: tool_calls: found the keys"),
        (after_q({**assistant(""), "tool_calls": [call("f", [1])]}), "arguments: got [1]"),
        ({"messages": QA, "tools": "search"}, "tools: got 'search', expected a list of tools"),
        ({"messages": QA, "tools": [{"nam": "f"}]}, "tools: found the keys nam; expected a list of tools"),
        ({"messages": [system("S"), *QA], "system": "T"}, "system: got 'T', but message 1 is another system"),
        ({"messages": [turn("system", part("tools", TOOLS)), *QA], "tools": TOOLS}, "and in message 1;"),
        ({"prompt": "Q", "chosen": "A", "rejected": "B"}, "key chosen is not supported: fine-tuning"),
        ({"conversations": [says("human", "Q")], "image": "a.png"}, "key image is not supported: only text"),
        # Parts of a content.
        (after_q(turn("assistant", part("text", "A"), part("reasoning", "R"))), "part 2: got type 'reas"),
        (after_q(turn("assistant", {"words": "A"})), "part 1: found the keys words; expected text or value"),
        (after_q(turn("assistant", part("tool_call", "f(1)"))), "part 1: got 'f(1)', expected an object"),
        (after_q(turn("assistant", 7)), "part 1: got 7, expected text"),
    ],
)  # fmt: skip
def test_bad_row_says_what_was_found_and_expected(row: dict, said: str) -> None:
    with pytest.raises(DataError) as caught:
        to_conversation(row, WHERE)
    assert str(caught.value).startswith(f"{WHERE}: ")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("row", "columns", "said"),
    [
        ({"qestion": "Q"}, {"instruction": "question"}, "--columns instruction=question: found the keys q"),
        ({"qestion": "Q"}, {"instruction": "question"}, "(null if it has none), did you mean qestion?"),
        ({"instruction": "Q", "output": "A"}, {"system": "persona"}, "expected the key persona"),
        ({"messages": [{"role": "user", "txt": ""}]}, {"content": "text"}, "1: --columns content=text: "),
    ],
)
def test_missing_column_is_named_with_both_names(row: dict, columns: dict, said: str) -> None:
    with pytest.raises(DataError) as caught:
        to_conversation(row, WHERE, FormatOptions(columns=columns))
    assert str(caught.value).startswith(f"{WHERE}: ") and said in str(caught.value)


def test_keys_and_roles_of_any_size_and_number_are_named_in_part() -> None:
    """A search for the nearest name in 50 MB would take hours."""
    long = "instruction" * 5_000_000
    for row in (
        {long: "I", "output": "O"},
        {f"{long}{number}": number for number in range(3)} | {str(number): number for number in range(10**5)},
        {"messages": [{"role": long, "content": ""}]},
        {"messages": [{long: "user", "content": ""}]},
        {"messages": QA, "tools": [{long: 1}]},
    ):
        with pytest.raises(DataError, match="instructioninstruction") as caught:
            to_conversation(row, WHERE)
        assert len(str(caught.value)) < 1500


def test_one_conversation_in_every_format_is_one_sample(tmp_path: Path) -> None:
    """Through reading, rendering and tokenizing, in one file of mixed rows."""
    turns = [("user", "hello"), ("assistant", "world"), ("user", "again"), ("assistant", "there")]
    names = {"user": "human", "assistant": "gpt"}
    messages = [{"role": role, "content": text} for role, text in turns]
    rows = [
        {"system": "be", "instruction": "again", "output": "there", "history": [["hello", "world"]]},
        {"system": "be", "query": "again", "response": "there", "history": [["hello", "world"]]},
        {"system": "be", "conversations": [{"from": names[role], "value": text} for role, text in turns]},
        {"system": "be", "conversation": [{names[role]: text} for role, text in turns]},
        {"messages": [system("be"), *messages]},
        {"messages": [{"role": "developer", "content": [{"type": "text", "text": "be"}]}, *messages]},
        {"prompt": [system("be"), user("hello")], "completion": messages[1:]},
        {"messages": None, "text": None, "system_prompt": "be", "conversations": messages},
    ]  # fmt: skip
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = load_sft(path, tiny_tokenizer(), 64)
    assert len(source) == len(rows)
    learned = source[0].labels[source[0].loss_mask.bool()].tolist()
    assert tiny_tokenizer().decode(learned) == "world<|eot_id|>there<|eot_id|>"
    for index in range(1, len(rows)):
        assert torch.equal(torch.stack(source[index][:3]), torch.stack(source[0][:3])), rows[index]
