"""What a tokenizer's chat template writes, and how it begins and ends an answer."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from patch.data.chat_templates import template_name
from patch.data.formats import Message
from patch.data.rendering.spans import any_of
from patch.data.tokenizer import special_tokens
from patch.errors import DataError
from patch.logger import get_logger

_logger = get_logger(__name__)

PROBE: list[Message] = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
"""A short conversation of our own, which shows how a template writes an answer."""
_OTHER_ANSWER: Message = {"role": "assistant", "content": "reply"}
CURE = "use a chat template that writes the generation prompt before, and a special token after, each answer"
FOREIGN_CURE = "use the chat template that the model was published with"
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_FRAME_LENGTH = 1 << 16
_LENGTH_RATIO = 16
"""A template may write _FRAME_LENGTH characters for a message, and this many for each of its characters."""


@dataclass(frozen=True)
class Row:
    """A conversation as the template gets it: its texts are marked."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    where: str
    """File and row, for error messages."""

    def beginning(self, count: int) -> Row:
        """The first messages of the row."""
        return Row(self.messages[:count], self.tools, self.where)

    @cached_property
    def longest_text(self) -> int:
        """Characters that a template may write for this row."""
        num_frames = len(self.messages) + len(self.tools or ())
        return _FRAME_LENGTH * num_frames + _LENGTH_RATIO * _length((self.messages, self.tools))


_PROBE_ROW = Row(PROBE, None, "chat template")


class Template:
    """Applies a tokenizer's chat template; a template is foreign code, which can raise anything.

    Args:
        tokenizer: has the template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._special = re.compile(any_of(special_tokens(tokenizer)))
        self._special_tokens_map: dict[str, Any] = dict(tokenizer.special_tokens_map)
        self.name = template_name(tokenizer)

    def marks_answers(self, row: Row) -> bool:
        """Whether the template for this row has `{% generation %}` around what the assistant says."""
        if self._tokenizer.chat_template is None:
            raise DataError(
                f"tokenizer: {self._tokenizer.name_or_path} has no chat template, which conversations need; "
                "choose one (--chat-template), or put the one that you will generate with into "
                "chat_template.jinja beside it",
                field="chat_template",
            )
        try:
            return _GENERATION.search(self._tokenizer.get_chat_template(None, row.tools)) is not None
        except Exception as error:  # noqa: BLE001 - a template may be missing, or no text
            raise self._failure(row, error) from error

    def write(self, row: Row, *, generate: bool = False) -> str:
        """The text of a conversation; with `generate` the prompt for the next answer follows.

        Raises:
            DataError: the template fails, refuses the conversation, or writes far more than it was given.
        """
        try:
            text: Any = self._tokenizer.apply_chat_template(
                row.messages, tools=cast(list, row.tools), tokenize=False, add_generation_prompt=generate
            )
        except Exception as error:  # noqa: BLE001 - the template is a program
            raise self._failure(row, error) from error
        self._check_length(row, text)
        return str(text)

    def write_marked(self, row: Row) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and where each `{% generation %}` block of it begins and ends.

        Raises:
            DataError: see `write`.
        """
        try:
            # The second of what it returns, which its annotation leaves out, is where the blocks are.
            rendered: Any = render_jinja_template(
                [row.messages],
                tools=cast(list, row.tools),
                chat_template=self._tokenizer.get_chat_template(None, row.tools),
                return_assistant_tokens_mask=True,
                **self._special_tokens_map,
            )
        except Exception as error:  # noqa: BLE001 - the template is a program
            raise self._failure(row, error) from error
        (text,), (blocks,) = rendered
        self._check_length(row, text)
        return text, blocks

    def end_of_turn(self, text: str, start: int, row: Row) -> int:
        """Where the turn ends whose words end at or after `start`: after the token that ends it.

        Args:
            text: the text of the conversation; it ends with this turn.
            start: where the turn's words end, or earlier if no special token comes between.
            row: the conversation.

        Raises:
            DataError: no special token follows.
        """
        place = text.find(self._end_token, start)
        if place >= 0:
            return place + len(self._end_token)
        # A call of a tool may end with another token, after further special tokens.
        *_, last = [None, *self._special.finditer(text, start)]
        if last is None:
            raise DataError(
                f"{row.where}: {self.name} ends the assistant's turn without a special token, so the model "
                f"would not learn to stop; {CURE}"
            )
        return last.end()

    def begin_of_block(self, text: str, start: int) -> int:
        """Where the answer begins that a `{% generation %}` block writes: after the header, if that is in it.

        Args:
            text: the text of the conversation.
            start: where the block begins.
        """
        size = len(self.prompt)
        header = text.find(self.prompt, max(0, start - size), start + size)
        return start if header < 0 else max(start, header + size)

    def has_words(self, text: str) -> bool:
        """Whether there is more in a text than special tokens and blanks."""
        return bool(self._special.sub("", text).strip())

    def end_of_block(self, text: str, start: int, end: int, row: Row) -> int:
        """Where the turn ends that a `{% generation %}` block writes.

        What the block writes after its last token, such as ChatML's line break, does not belong to the turn.
        A token that follows the block does; a special token in the block may close a tool's call only.

        Args:
            text: the text of the conversation.
            start: where the block begins.
            end: where it ends.
            row: the conversation.

        Raises:
            DataError: neither the end of the block nor what follows it is a special token.
        """
        *_, last = [None, *self._special.finditer(text, start, end)]
        if last is not None and not text[last.end() : end].strip():
            return self._with_end_token(text, last.end())
        blanks = len(text[end:]) - len(text[end:].lstrip())
        following = self._special.match(text, end + blanks)
        if following is None:
            raise DataError(
                f"{row.where}: {self.name} ends the assistant's turn without a special token, so the model "
                f"would not learn to stop; {CURE}"
            )
        return self._with_end_token(text, following.end())

    def _with_end_token(self, text: str, end: int) -> int:
        """Where the end token ends, if it or the rest of it follows what ends at `end`; otherwise `end`."""
        token = self._end_token
        for size in range(len(token) - 1, 0, -1):
            if text.startswith(token[size:], end) and text.endswith(token[:size], 0, end):
                return end + len(token) - size
        following = len(text) - len(text[end:].lstrip())
        has_ended = text.endswith(token, 0, end)
        return following + len(token) if not has_ended and text.startswith(token, following) else end

    def turns_of(self, text: str) -> list[str]:
        """A text, divided where the user speaks after an answer (see `question_header`)."""
        if not self.question_header:
            return [text]
        first, *others = text.split(self._end_token + self.question_header)
        begins = ["", *[self.question_header] * len(others)]
        ends = [*[self._end_token] * len(others), ""]
        return [begin + part + end for begin, part, end in zip(begins, [first, *others], ends, strict=True)]

    @cached_property
    def question_header(self) -> str:
        """What the template writes between an answer and the user's next words; "" if that is unknown."""
        try:
            text = self.write(Row([*PROBE, PROBE[0]], None, _PROBE_ROW.where))
            after_answer = text.rpartition(PROBE[1]["content"])[2]
            header, question, _ = after_answer.partition(self._end_token)[2].partition(PROBE[0]["content"])
        except DataError:
            return ""
        return header if question else ""

    @cached_property
    def answer_header(self) -> str:
        """What the template writes between a question and its answer; "" if that is unknown."""
        try:
            return self.prompt
        except DataError:
            return ""

    @cached_property
    def header(self) -> str:
        """What the template writes before an answer, where it has no prompt for generation that says so."""
        prompt = self.write(_PROBE_ROW.beginning(1), generate=True)
        if prompt != self.write(_PROBE_ROW.beginning(1)) or not self._header:
            return ""
        _logger.warning(
            "%s writes no prompt for generation: %r before each answer is not learned, so it must be written "
            "before the model answers",
            self.name,
            self._header,
        )
        return self._header

    @cached_property
    def prompt(self) -> str:
        """What the template writes before an answer, as its prompt for generation or else as its header."""
        told = self.write(_PROBE_ROW.beginning(1))
        prompt = self.write(_PROBE_ROW.beginning(1), generate=True)
        if prompt != told and self.write(_PROBE_ROW).startswith(prompt):
            return prompt.removeprefix(told)
        return self._header

    @cached_property
    def _header(self) -> str:
        """What two different answers have in common at their beginning.

        Blanks before the words belong to the words, as LLaMA 2's tokenizer has them.
        """
        told = self.write(_PROBE_ROW.beginning(1))
        answers = [
            self.write(Row([PROBE[0], answer], None, _PROBE_ROW.where)).removeprefix(told)
            for answer in (PROBE[1], _OTHER_ANSWER)
        ]
        header = os.path.commonprefix(answers).rstrip(" ")
        return header if header.strip() else ""

    @cached_property
    def _end_token(self) -> str:
        """The special token that ends an answer, or several that follow each other.

        Of those after our own answer, as many as also stand there when a question follows: neither that
        question's header nor what only ends the whole conversation.

        Raises:
            DataError: the template writes none.
        """
        text = self.write(_PROBE_ROW)
        begin = text.rfind(PROBE[1]["content"])
        found = self._special.search(text, begin)
        if found is None:
            raise DataError(
                f"{_PROBE_ROW.where}: {self.name} ends the assistant's turn without a special token, so the "
                f"model would not learn to stop; {CURE}"
            )
        try:
            followed = self.write(Row([*PROBE, PROBE[0]], None, _PROBE_ROW.where))
        except DataError:
            followed = ""
        end = found.end()
        if followed.startswith(text[:end]):
            while (more := self._special.match(text, end)) and followed.startswith(text[: more.end()]):
                end = more.end()
        return text[found.start() : end]

    def _failure(self, row: Row, error: Exception) -> DataError:
        if isinstance(error, TemplateError):
            return DataError(f"{row.where}: {self.name} refuses the conversation: {error!s:.500}")
        reason = f"{type(error).__name__}: {error!s:.500}"
        return DataError(f"{row.where}: {self.name} fails: {reason}; {FOREIGN_CURE}")

    def _check_length(self, row: Row, text: str) -> None:
        # Most texts are shorter than the smallest limit, and counting a row's characters takes time.
        if len(text) > _FRAME_LENGTH and len(text) > row.longest_text:
            raise DataError(
                f"{row.where}: {self.name} writes {len(text)} characters, expected at most "
                f"{row.longest_text} for these {len(row.messages)} messages; {FOREIGN_CURE}"
            )


def _length(value: Any) -> int:
    """Characters of all texts of JSON-like data."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(key) + _length(item) for key, item in value.items())
    return sum(map(_length, value)) if isinstance(value, (list, tuple)) else 0
