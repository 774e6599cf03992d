"""A conversation as text, cut where learning begins and ends.

The loss covers what the assistant says and the token that ends its turn, so that the model learns to stop.
The header before it is what generation is given, so it is not learned; what the template writes after
the end of the turn (ChatML's newline) is neither.

Prompt and answer are encoded apart: a generating model is given the prompt alone, and byte-level BPE could
otherwise merge the header's last characters with the answer's first.

Special tokens spelled out in a message become special tokens, as in transformers' own chat templates: what
is trained is what would be generated from.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from patch.data.formats import Message
from patch.data.tokenizer import special_tokens
from patch.errors import DataError

_PROBE = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
_CURE = "use a chat template that writes the generation prompt before, and a special token after, each answer"


class Span(NamedTuple):
    """A piece of text to encode on its own."""

    text: str
    learned: bool


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The id of the token that the chat template ends an answer with; None without such a template."""
    try:
        *_, answer = ChatRenderer(tokenizer).render(_PROBE, "chat template")
    except ValueError:  # transformers' own for a template that is missing or has no default, and DataError
        return None
    return tokenizer(answer.text, add_special_tokens=False)["input_ids"][-1]


class ChatRenderer:
    """Renders conversations with a tokenizer's chat template.

    Raises:
        DataError: the template cannot be trained with (seen on a short conversation of our own).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._special = re.compile("|".join(map(re.escape, special_tokens(tokenizer))) or r"(?!)")
        self.render(_PROBE, "chat template")

    def render(self, messages: list[Message], where: str) -> list[Span]:
        """The conversation up to the end of the assistant's last turn; empty when it never speaks.

        An assistant's turn without words is kept as context and not learned.

        Args:
            where: file and row, for messages.
        Raises:
            DataError: the template refuses the conversation, rewrites earlier turns, or does not end a turn.
        """
        spans: list[Span] = []
        done = ""
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._apply(messages[:index], where, generate=True)
            answered = self._apply(messages[: index + 1], where, generate=False)
            if not prompt.startswith(done) or not answered.startswith(prompt):
                raise DataError(
                    f"{where}: message {index + 1}: the chat template writes what comes before the answer "
                    f"otherwise than the prompt for it, so the two cannot be told apart; {_CURE}"
                )
            content = message["content"].strip()
            end = self._end_of_turn(answered, len(prompt), content, where)
            spans.append(Span(prompt[len(done) :], False))
            spans.append(Span(answered[len(prompt) : end], bool(content)))
            done = answered[:end]
        return spans

    def holds_special_token(self, messages: list[Message]) -> bool:
        """Whether a message spells out a special token."""
        return any(self._special.search(message["content"]) for message in messages)

    def _apply(self, messages: list[Message], where: str, *, generate: bool) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)
            )
        except TemplateError as error:
            raise DataError(f"{where}: the chat template refuses the conversation: {error}") from error

    def _end_of_turn(self, text: str, start: int, content: str, where: str) -> int:
        """Where the first special token after the answer's words ends."""
        words = text.find(content, start)
        found = self._special.search(text, words + len(content) if words >= 0 else start)
        if found is None:
            raise DataError(
                f"{where}: the chat template ends the assistant's turn without a special token, so the model "
                f"would not learn to stop; {_CURE}"
            )
        return found.end()
