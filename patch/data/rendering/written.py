"""Notices what a chat template does not write: it would be lost without a word.

Many templates know nothing of tools, and write neither them nor their answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from patch.data.formats import Message
from patch.data.rendering.template import Row
from patch.errors import DataError

_REASONING = ("reasoning_content", "thinking", "reasoning")
_END_OF_THOUGHTS = "</think>"
"""The end of thoughts within the words, which templates take apart."""
_CURE = "use a chat template that writes it, such as that of the instruct model (--chat-template)"


def words_of(message: Message) -> str:
    """What a message says, without blanks around it; the texts of a content in parts are concatenated."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return content.strip()


def says_something(message: Message) -> bool:
    """Whether there are words, thoughts or calls of tools in a message."""
    return bool(words_of(message) or message.get("tool_calls") or any(map(message.get, _REASONING)))


def check_answer(name: str, row: Row, index: int, answer: str) -> None:
    """Check that an answer has the end of the assistant's words, and its calls of tools.

    Args:
        name: of the template, for error messages.
        row: the conversation.
        index: of the message in it.
        answer: what the template wrote for it.

    Raises:
        DataError: something is missing; the message names it.
    """
    message = row.messages[index]
    # Templates may write thoughts, which stand before the words, in another way.
    last_line = words_of(message).rpartition("\n")[2].rpartition(_END_OF_THOUGHTS)[2].strip()
    if not _is_in(answer, last_line):
        raise _loss(name, row, index, "what the assistant says", last_line)
    thoughts = next((message[key] for key in _REASONING if message.get(key)), "")
    if not _is_in(answer, thoughts):
        raise _loss(name, row, index, "what the assistant thinks", thoughts)
    for call in message.get("tool_calls") or ():
        for value in _texts_of_call(call):
            if not _is_in(answer, value):
                raise _loss(name, row, index, "a call of a tool", value)


def check_row(name: str, row: Row, text: str) -> None:
    """Check that a text has the tools, the answers of tools, and what the system says.

    Args:
        name: of the template, for error messages.
        row: the conversation.
        text: what the template wrote for it.

    Raises:
        DataError: something is missing; the message names it.
    """
    for tool in row.tools or ():
        tool_name = tool.get("function", tool).get("name", "")
        if not _is_in(text, tool_name):
            raise _loss(name, row, None, "the tools", tool_name)
    for index, message in enumerate(row.messages):
        if message["role"] not in ("user", "assistant") and not _is_in(text, words_of(message)):
            raise _loss(name, row, index, f"what the {message['role']} says", words_of(message))


def _loss(name: str, row: Row, index: int | None, what: str, value: str) -> DataError:
    place = row.where if index is None else f"{row.where}: message {index + 1}"
    return DataError(f"{place}: {name} does not write {what} ({value!r:.60}); {_CURE}", field="chat_template")


def _texts_of_call(call: Any) -> Iterator[str]:
    """The name of the tool and the texts among its arguments."""
    function = call.get("function", call)
    yield function.get("name", "")
    yield from _texts(function.get("arguments"))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _is_in(text: str, value: str) -> bool:
    """Whether a text has a value as it is, or as it is written in JSON, or in JSON within JSON."""
    for _ in range(3):
        if value.strip() in text:
            return True
        value = json.dumps(value, ensure_ascii=False)[1:-1]
    return False
