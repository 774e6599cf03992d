"""Renders a conversation as text, split where learning begins and ends.

The loss covers the assistant's words and the token that ends its turn, so that the model learns to stop. The
header before the words is not learned, because generation starts after it. What the template writes after the
end of the turn (such as ChatML's newline) is not learned either.

Prompt and answer are encoded separately, because generation encodes the prompt alone; encoded together,
byte-level BPE could merge the last characters of the header with the first ones of the answer.

Special tokens that are spelled out in a message become special tokens, as with transformers' own chat
templates, so that training and generation see the same tokens.

A template is code that comes with a tokenizer, so it runs in its own process (see bounded_process.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cached_property

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from patch.data.formats import Conversation, Message
from patch.data.rendering.bounded_process import BoundedMap, ChildEndedError
from patch.data.rendering.spans import Span
from patch.data.tokenizer import special_tokens, template_name
from patch.errors import DataError

_PROBE = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
_CURE = "use a chat template that writes the generation prompt before, and a special token after, each answer"
_FOREIGN_CURE = "use the chat template that the model was published with"
_MANY_TURNS = 4
"""From this many turns of the assistant on, the fast way of rendering is tried."""
_FRAME_LENGTH = 1 << 16
_LENGTH_RATIO = 16
"""A template may write _FRAME_LENGTH + _LENGTH_RATIO * len(message) characters for a message."""


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The id of the token with which the chat template ends an answer; None if there is no such template."""
    try:
        *_, answer = ChatRenderer(tokenizer).render(_PROBE, "chat template")
    except ValueError:  # DataError, or transformers' error for a template that is missing or has no default
        return None
    return tokenizer(answer.text, add_special_tokens=False)["input_ids"][-1]


class ChatRenderer:
    """Renders conversations with a tokenizer's chat template.

    Raises:
        DataError: the template cannot be used for training; a short conversation of our own is the test.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._special = re.compile("|".join(map(re.escape, special_tokens(tokenizer))) or r"(?!)")
        self._name = template_name(tokenizer)
        self._map = BoundedMap(self._spans)
        self.render(_PROBE, "chat template")

    def render(self, messages: list[Message], where: str) -> list[Span]:
        """Render one conversation; see `render_all`."""
        conversation = Conversation(messages, None, (True,) * len(messages), where)
        ((_, (spans,)),) = self.render_all([[conversation]])
        return spans

    def render_all(
        self, batches: Iterable[list[Conversation]]
    ) -> Iterator[tuple[list[Conversation], list[list[Span]]]]:
        """Render each conversation up to the end of the assistant's last turn; empty if there is none.

        An assistant's turn without words stays as context and is not learned. A batch is rendered while the
        caller uses the previous one.

        Raises:
            DataError: the template fails or does not end, refuses a conversation, changes earlier turns, or
                does not end a turn with a special token.
        """
        try:
            yield from self._map(batches)
        except ChildEndedError as error:
            raise DataError(f"{error.item.where}: {self._name} {error}; {_FOREIGN_CURE}") from error

    def holds_special_token(self, messages: list[Message]) -> bool:
        """Whether a message spells out a special token."""
        return any(self._special.search(message["content"]) for message in messages)

    def _spans(self, conversation: Conversation) -> list[Span]:
        """Render one conversation; in linear time if the text of a turn does not depend on earlier turns."""
        if sum(message["role"] == "assistant" for message in conversation.messages) >= _MANY_TURNS:
            try:
                return self._spans_of_turns(conversation, is_local=True)
            except DataError:
                # Either the text of a turn depends on earlier turns, or the row is wrong. The slow way tells.
                pass
        return self._spans_of_turns(conversation, is_local=False)

    def _spans_of_turns(self, conversation: Conversation, *, is_local: bool) -> list[Span]:
        """The prompt and the answer of each of the assistant's turns.

        They are cut from the text of the whole conversation up to that turn, which takes a time quadratic in
        the number of turns. With `is_local` only turns 1, 2, 4, 8, ... and the last one are rendered so. The
        others are rendered after a short conversation of our own; the next turn that is rendered in full then
        shows whether their text is right.
        """
        messages, where = conversation.messages, conversation.where
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        spans: list[Span] = []
        begin = 0
        for number, index in enumerate(turns, start=1):
            is_power_of_2 = number & (number - 1) == 0
            if is_local and not is_power_of_2 and number < len(turns):
                turn, text_before = [*_PROBE, *messages[begin : index + 1]], self._probe_text
            else:
                turn, text_before = messages[: index + 1], "".join(span.text for span in spans)
            spans += self._spans_of_turn(turn, text_before, where, index + 1)
            begin = index + 1
        return spans

    @cached_property
    def _probe_text(self) -> str:
        return "".join(span.text for span in self._spans_of_turn(_PROBE, "", "chat template", len(_PROBE)))

    def _spans_of_turn(
        self, messages: list[Message], text_before: str, where: str, number: int
    ) -> list[Span]:
        """The prompt and the answer of one turn.

        Args:
            messages: the conversation; the last message is the answer.
            text_before: the rendered text of the turns before this one; the prompt is what follows it.
            where: file and row, for error messages.
            number: the number of the last message in its row, for error messages.
        """
        prompt = self._apply(messages[:-1], where, generate=True)
        answered = self._apply(messages, where, generate=False)
        if not prompt.startswith(text_before) or not answered.startswith(prompt):
            raise DataError(
                f"{where}: message {number}: {self._name} writes the text before the answer differently "
                f"from the prompt for it, so prompt and answer cannot be separated; {_CURE}"
            )
        content = messages[-1]["content"].strip()
        end = self._end_of_turn(answered, len(prompt), content, where)
        return [Span(prompt[len(text_before) :], False), Span(answered[len(prompt) : end], bool(content))]

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
        limit = sum(_FRAME_LENGTH + _LENGTH_RATIO * len(message["content"]) for message in messages)
        if len(text) > limit:
            raise DataError(
                f"{where}: {self._name} writes {len(text)} characters, expected at most {limit} for these "
                f"{len(messages)} messages; {_FOREIGN_CURE}"
            )
        return str(text)

    def _end_of_turn(self, text: str, start: int, content: str, where: str) -> int:
        """The position after the first special token that follows the answer's words.

        Args:
            text: the rendered conversation.
            start: where the answer begins in it.
            content: the answer's words; the template may have changed them.
            where: file and row, for error messages.
        """
        words = text.find(content, start)
        match = self._special.search(text, words + len(content) if words >= 0 else start)
        if match is None:
            raise DataError(
                f"{where}: {self._name} ends the assistant's turn without a special token, so the model "
                f"would not learn to stop; {_CURE}"
            )
        return match.end()
