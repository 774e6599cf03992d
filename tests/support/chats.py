"""Conversations for tests, as the readers of the formats build them."""

from typing import Any

from patch.data.formats.turns import Conversation


def chat(
    messages: list[dict[str, Any]],
    *,
    tools: list[dict[str, Any]] | None = None,
    learned: tuple[bool, ...] | None = None,
    where: str = "row",
) -> Conversation:
    """Return a conversation. All messages are learned unless `learned` says otherwise."""
    return Conversation(messages, tools, learned or (True,) * len(messages), where)


def turns(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": system}] if system else []
    for index, content in enumerate(contents):
        messages.append({"role": ("user", "assistant")[index % 2], "content": content})
    return messages
