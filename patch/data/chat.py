"""A conversation as text, cut where learning begins and ends.

The loss covers what the assistant says and the token that ends its turn, so that the model learns to stop.
The header before it is what generation is given, so it is not learned; what the template writes after
the end of the turn (ChatML's newline) is neither.

Prompt and answer are encoded apart: a generating model is given the prompt alone, and byte-level BPE could
otherwise merge the header's last characters with the answer's first.

Special tokens spelled out in a message become special tokens, as in transformers' own chat templates: what
is trained is what would be generated from.

A template is code that came with a tokenizer: it runs in a process of its own (see bounded_process.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from patch.data.bounded_process import BoundedMap, ChildEndedError
from patch.data.formats import Message
from patch.data.tokenizer import special_tokens, template_name
from patch.errors import DataError

_PROBE = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
_CURE = "use a chat template that writes the generation prompt before, and a special token after, each answer"
_FOREIGN_CURE = "use the chat template that the model was published with"
_MANY_TURNS = 4
"""Fewer are all cut from the conversation itself."""
_FRAME_LENGTH = 1 << 16
_LENGTH_RATIO = 16
"""Characters that a template may write for a message: these, and so many for each of its own."""


class Span(NamedTuple):
    """A piece of text to encode on its own."""

    text: str
    learned: bool


class Conversation(NamedTuple):
    """What is rendered as one text."""

    messages: list[Message]
    where: str
    """File and row, for messages."""


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
        self._name = template_name(tokenizer)
        self._map = BoundedMap(self._spans)
        self.render(_PROBE, "chat template")

    def render(self, messages: list[Message], where: str) -> list[Span]:
        """One conversation; see `render_all`."""
        ((_, (spans,)),) = self.render_all([[Conversation(messages, where)]])
        return spans

    def render_all(
        self, batches: Iterable[list[Conversation]]
    ) -> Iterator[tuple[list[Conversation], list[list[Span]]]]:
        """Each conversation up to the end of the assistant's last turn; empty where it never speaks.

        An assistant's turn without words is kept as context and not learned. A batch is rendered while the
        caller has the one before it.

        Raises:
            DataError: the template fails or has no end, refuses a conversation, rewrites earlier turns, or
                does not end a turn.
        """
        try:
            yield from self._map(batches)
        except ChildEndedError as error:
            raise DataError(f"{error.item.where}: {self._name} {error}; {_FOREIGN_CURE}") from error

    def holds_special_token(self, messages: list[Message]) -> bool:
        """Whether a message spells out a special token."""
        return any(self._special.search(message["content"]) for message in messages)

    def _spans(self, conversation: Conversation) -> list[Span]:
        """In a time linear in its turns where a turn is written alike after whatever went before."""
        if sum(message["role"] == "assistant" for message in conversation.messages) >= _MANY_TURNS:
            try:
                return self._spans_of_turns(conversation, is_local=True)
            except DataError:  # of another template or a row that is refused: the definition tells which
                pass
        return self._spans_of_turns(conversation, is_local=False)

    def _spans_of_turns(self, conversation: Conversation, *, is_local: bool) -> list[Span]:
        """The pieces of each of the assistant's turns.

        By definition they are cut from the text of the conversation up to there. With `is_local` that is done
        only for turns 1, 2, 4, 8, ... and the last one, which shows whether the others are right: those are
        cut from what the template writes for them after a short conversation of our own.
        """
        messages, where = conversation
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        spans: list[Span] = []
        begin = 0
        for number, index in enumerate(turns, start=1):
            if is_local and number & (number - 1) and number < len(turns):
                turn, done = [*_PROBE, *messages[begin : index + 1]], self._probe_text
            else:
                turn, done = messages[: index + 1], "".join(span.text for span in spans)
            spans += self._spans_of_turn(turn, done, where, index + 1)
            begin = index + 1
        return spans

    @cached_property
    def _probe_text(self) -> str:
        return "".join(span.text for span in self._spans_of_turn(_PROBE, "", "chat template", len(_PROBE)))

    def _spans_of_turn(self, messages: list[Message], done: str, where: str, number: int) -> list[Span]:
        """What the last of the messages is asked with, after the text that is `done`, and what it says."""
        prompt = self._apply(messages[:-1], where, generate=True)
        answered = self._apply(messages, where, generate=False)
        if not prompt.startswith(done) or not answered.startswith(prompt):
            raise DataError(
                f"{where}: message {number}: {self._name} writes what comes before the answer "
                f"otherwise than the prompt for it, so the two cannot be told apart; {_CURE}"
            )
        content = messages[-1]["content"].strip()
        end = self._end_of_turn(answered, len(prompt), content, where)
        return [Span(prompt[len(done) :], False), Span(answered[len(prompt) : end], bool(content))]

    def _apply(self, messages: list[Message], where: str, *, generate: bool) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generate
            )
        except TemplateError as error:
            raise DataError(f"{where}: {self._name} refuses the conversation: {error!s:.500}") from error
        except Exception as error:  # noqa: BLE001 - the template is a program, and can raise anything
            reason = f"{type(error).__name__}: {error!s:.500}"
            raise DataError(f"{where}: {self._name} fails: {reason}; {_FOREIGN_CURE}") from error
        most = sum(_FRAME_LENGTH + _LENGTH_RATIO * len(message["content"]) for message in messages)
        if len(text) > most:
            raise DataError(
                f"{where}: {self._name} writes {len(text)} characters, expected at most {most} for these "
                f"{len(messages)} messages; {_FOREIGN_CURE}"
            )
        return str(text)

    def _end_of_turn(self, text: str, start: int, content: str, where: str) -> int:
        """Where the first special token after the answer's words ends."""
        words = text.find(content, start)
        found = self._special.search(text, words + len(content) if words >= 0 else start)
        if found is None:
            raise DataError(
                f"{where}: {self._name} ends the assistant's turn without a special token, so the model "
                f"would not learn to stop; {_CURE}"
            )
        return found.end()
