"""Rows of every supported format, and what is said about the others."""

import pytest

from patch.data.formats import to_conversation
from patch.errors import DataError


def system(text: str) -> dict:
    return {"role": "system", "content": text}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"instruction": "I", "output": "O"}, [user("I"), assistant("O")]),
        ({"instruction": "I", "input": "", "output": "O"}, [user("I"), assistant("O")]),
        ({"instruction": "I", "input": None, "output": "O"}, [user("I"), assistant("O")]),
        ({"instruction": "I", "input": " \n", "output": "O"}, [user("I"), assistant("O")]),
        ({"instruction": "I", "input": "X", "output": "O"}, [user("I\nX"), assistant("O")]),
        ({"instruction": "I", "system": "S", "output": "O"}, [system("S"), user("I"), assistant("O")]),
        ({"instruction": "I", "system": "", "output": "O"}, [user("I"), assistant("O")]),
        ({"query": "Q", "response": "R"}, [user("Q"), assistant("R")]),
        ({"query": "Q", "content": "R", "id": 7}, [user("Q"), assistant("R")]),
        ({"instruction": "I", "output": "O", "history": [], "tools": None}, [user("I"), assistant("O")]),
        ({"messages": [user("Q"), assistant("A")]}, [user("Q"), assistant("A")]),
        (
            {"messages": [system("S"), user("Q"), assistant("A"), user("R")], "instruction": "unused"},
            [system("S"), user("Q"), assistant("A"), user("R")],
        ),
        ({"messages": [{**user("Q"), "id": 3, "tool_calls": None}]}, [user("Q")]),
    ],
)
def test_row_becomes_conversation(row: dict, messages: list) -> None:
    conversation = to_conversation(row, "f: row 1")
    assert conversation.messages == messages and conversation.where == "f: row 1"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"instructoin": "I", "output": "O"}, "found the keys instructoin, output"),
        ({"instructoin": "I", "output": "O"}, "instructoin, did you mean instruction?"),
        ({"instruction": "I", "ouput": "O"}, "ouput, did you mean output?"),
        ({"massages": []}, "massages, did you mean messages?"),
        ({"text": "T"}, "expected instruction (or query) and output (or response, content), or messages"),
        ({}, "found the keys none"),
        ({"instruction": 3, "output": "O"}, "instruction: got 3, expected text"),
        ({"instruction": "I", "output": None}, "output: got None, expected text"),
        ({"instruction": "I", "input": ["X"], "output": "O"}, "input: got ['X'], expected text"),
        ({"conversations": [{"from": "human", "value": "V"}]}, "conversations is not supported yet"),
        ({"instruction": "I", "output": "O", "history": [["a", "b"]]}, "history is not supported yet"),
        ({"messages": [user("Q"), assistant("A")], "tools": "[]"}, "tools is not supported yet"),
        ({"messages": "hello"}, "messages: expected a list"),
        ({"messages": ["hello"]}, "messages: expected a list"),
        ({"messages": []}, "nobody speaks first"),
        ({"messages": [system("S"), assistant("A")]}, "assistant speaks first"),
        ({"messages": [user("Q"), {"role": "asistant", "content": "A"}]}, "did you mean assistant?"),
        ({"messages": [{"role": "tool", "content": "A"}]}, "message 1: role: got 'tool'"),
        ({"messages": [user("Q"), {"role": "assistant", "contnt": "A"}]}, "contnt, did you mean content?"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "message 1: content: got"),
        ({"messages": [user("Q"), {**assistant("A"), "weight": 0}]}, "weight is not supported yet"),
        ({"messages": [user("Q"), {**assistant(""), "tool_calls": [{}]}]}, "message 2: key tool_calls"),
    ],
)
def test_bad_row_says_what_was_found_and_expected(row: dict, said: str) -> None:
    with pytest.raises(DataError) as caught:
        to_conversation(row, "f.json: row 9")
    assert str(caught.value).startswith("f.json: row 9: ")
    assert said in str(caught.value)


def test_keys_and_roles_of_any_size_and_number_are_named_in_part() -> None:
    """A search for the nearest name in 50 MB would take hours."""
    long = "instruction" * 5_000_000
    for row in (
        {long: "I", "output": "O"},
        {f"{long}{number}": number for number in range(3)} | {str(number): number for number in range(10**5)},
        {"messages": [{"role": long, "content": ""}]},
        {"messages": [{long: "user", "content": ""}]},
    ):
        with pytest.raises(DataError, match="instructioninstruction") as caught:
            to_conversation(row, "f.json: row 9")
        assert len(str(caught.value)) < 1500
