"""Contents in parts, as LLaMA-Factory's src/llamafactory/v1 has them, against hand-written messages."""

import json

import pytest

from patch.data.formats import Conversation, to_conversation
from patch.errors import DataError

TOOLS = [{"name": "f", "parameters": {}}, {"name": "g", "parameters": {}}]
CALLS = [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]


def part(kind: str, value: object) -> dict:
    return {"type": kind, "value": value if isinstance(value, str) else json.dumps(value)}


def turn(role: str, *parts: dict, **more: object) -> dict:
    return {"role": role, "content": list(parts), **more}


QA = [turn("user", part("text", "Q")), turn("assistant", part("text", "A"))]


def converted(row: dict) -> Conversation:
    conversation = to_conversation(row, "f.json: row 9")
    assert isinstance(conversation, Conversation)
    return conversation


def test_parts_are_words_thoughts_calls_and_tools() -> None:
    thinks = [part("reasoning", "R"), part("text", "B"), *(part("tool_call", call) for call in CALLS)]
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
    calls = [{"type": "function", "function": call} for call in CALLS]
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
    assert conversation.tools == [{"type": "function", "function": tool} for tool in TOOLS]
    # A system message of tools alone says nothing; and tools may stand beside the messages instead.
    turns[0]["content"].pop(0)
    assert converted({"messages": turns}).messages == conversation.messages[1:]
    assert converted({"messages": turns[1:], "tools": json.dumps(TOOLS)}).tools == conversation.tools
    assert converted({"prompt": turns[:2], "completion": turns[4:]}).tools == conversation.tools


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            turn("assistant", part("text", "A"), part("reasoning", "R")),
            "part 2: got type 'reasoning' behind others, expected reasoning, text, tool calls in this order",
        ),
        (
            turn("assistant", part("image_url", "a.png")),
            "part 1: got type 'image_url', expected text, reasoning, tool_call or tools: only text can be",
        ),
        (turn("assistant", {"words": "A"}), "part 1: found the keys words; expected text or value"),
        (turn("assistant", part("tool_call", "f(1)")), "part 1: got 'f(1)', expected an object such as"),
        (turn("system", part("tools", "f")), "part 1: got 'f', expected a list of tools"),
        (turn("assistant", 7), "part 1: got 7, expected text"),
    ],
)
def test_bad_part_says_what_was_found_and_expected(message: dict, said: str) -> None:
    with pytest.raises(DataError) as caught:
        converted({"messages": [QA[0], message]})
    assert str(caught.value).startswith(f"f.json: row 9: message 2: content: {said}")


def test_tools_at_two_places_are_refused() -> None:
    row = {"messages": [turn("system", part("tools", TOOLS)), *QA], "tools": TOOLS[:1]}
    with pytest.raises(DataError, match="stands beside the messages and in message 1; expected it once"):
        converted(row)
