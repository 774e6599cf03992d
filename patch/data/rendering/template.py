"""Renders a tokenizer's chat template, and finds how it begins and ends an answer."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from patch.data.chat_templates import template_name
from patch.data.formats.turns import Message
from patch.data.rendering.spans import any_of, texts_in
from patch.data.tokenizer import special_tokens
from patch.errors import DataError
from patch.logger import get_logger

_logger = get_logger(__name__)

PROBE: list[Message] = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
"""Short conversation that shows how a template writes an answer."""
_ANSWERS: list[Message] = [PROBE[1], {"role": "assistant", "content": "reply"}]
CURE = "use a chat template that writes the generation prompt before, and a special token after, each answer"
FOREIGN_CURE = "use the chat template that the model was published with"
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_FRAME_LENGTH = 1 << 16
_LENGTH_RATIO = 16
"""A template may write _FRAME_LENGTH characters per message, and this many per character of the message."""


@dataclass(frozen=True)
class MarkedChat:
    """Conversation as the template gets it, with marked texts."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    where: str

    def beginning(self, count: int) -> MarkedChat:
        """Return the chat with only its first messages."""
        return MarkedChat(self.messages[:count], self.tools, self.where)

    @cached_property
    def longest_text(self) -> int:
        """Most characters that a template may write for this chat."""
        num_frames = len(self.messages) + len(self.tools or ())
        num_characters = sum(map(len, texts_in((self.messages, self.tools))))
        return _FRAME_LENGTH * num_frames + _LENGTH_RATIO * num_characters


_PROBE_CHAT = MarkedChat(PROBE, None, "chat template")


class Template:
    """Chat template of a tokenizer. It is foreign code, which can raise anything."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        special = any_of(special_tokens(tokenizer))
        self._special = re.compile(special)
        self._special_with_blanks = re.compile(rf"(?:\s*(?:{special}))*")
        self._special_tokens_map: dict[str, Any] = dict(tokenizer.special_tokens_map)
        self.name = template_name(tokenizer)

    def marks_answers(self, chat: MarkedChat) -> bool:
        """Return whether the template for this row has `{% generation %}` around the assistant's words."""
        if self._tokenizer.chat_template is None:
            raise DataError(
                f"tokenizer: {self._tokenizer.name_or_path} has no chat template, which conversations need; "
                "choose one (--chat-template), or put the one that you will generate with into "
                "chat_template.jinja beside it",
                field="chat_template",
            )
        with self._refusing(chat):
            return _GENERATION.search(self._tokenizer.get_chat_template(None, chat.tools)) is not None

    def write(self, chat: MarkedChat, *, generate: bool = False) -> str:
        """Return the text of a conversation; with `generate`, the prompt for the next answer follows.

        Raises:
            DataError: the template fails, refuses the conversation, or writes far more than it was given.
        """
        with self._refusing(chat):
            text: Any = self._tokenizer.apply_chat_template(
                chat.messages, tools=cast(list, chat.tools), tokenize=False, add_generation_prompt=generate
            )
        self._check_length(chat, text)
        return str(text)

    def write_marked(self, chat: MarkedChat) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, and the begin and end of each `{% generation %}` block.

        Raises:
            DataError: see `write`.
        """
        with self._refusing(chat):
            # It also returns the positions of the blocks, which its annotation leaves out.
            rendered: Any = render_jinja_template(
                [chat.messages],
                tools=cast(list, chat.tools),
                chat_template=self._tokenizer.get_chat_template(None, chat.tools),
                return_assistant_tokens_mask=True,
                **self._special_tokens_map,
            )
        (text,), (blocks,) = rendered
        self._check_length(chat, text)
        return text, blocks

    def has_words(self, text: str) -> bool:
        """Return whether a text has more than special tokens and blanks."""
        return bool(self._special.sub("", text).strip())

    def begin_of_block(self, text: str, start: int) -> int:
        """Return where the answer of a `{% generation %}` block begins: after the header, if it has one."""
        size = len(self.prompt)
        header = text.find(self.prompt, max(0, start - size), start + size)
        return start if header < 0 else max(start, header + size)

    def end_of_turn(self, text: str, start: int, end: int, where: str) -> int:
        """Return the position after the turn's end tokens, which may stand after `end`.

        Args:
            start: begin of the turn's words.
            end: end of the template's text for the turn.
        Raises:
            DataError: no special token ends the turn or follows it.
        """
        following = self._special_with_blanks.match(text, end)
        assert following is not None, "it matches nothing too"
        if (place := text.rfind(self._end_token, start, following.end())) >= 0:
            last = place + len(self._end_token)
        else:  # a call of a tool may end with another token
            last = max((found.end() for found in self._special.finditer(text, start, end)), default=start)
        if last == start or self.has_words(text[last:end]):
            raise self._endless(where)
        return last

    def turns_of(self, text: str) -> list[str]:
        """Split a text where the user speaks after an answer (see `question_header`)."""
        if not self.question_header:
            return [text]
        first, *others = text.split(self._end_token + self.question_header)
        begins = ["", *[self.question_header] * len(others)]
        ends = [*[self._end_token] * len(others), ""]
        return [begin + part + end for begin, part, end in zip(begins, [first, *others], ends, strict=True)]

    @cached_property
    def question_header(self) -> str:
        """Template text between an answer and the user's next words; "" if unknown."""
        after_end = self._after_answer([PROBE[0]]).partition(self._end_token)[2]
        header, question, _ = after_end.partition(PROBE[0]["content"])
        return header if question else ""

    @cached_property
    def header(self) -> str:
        """Template text before an answer if the template has no generation prompt, else ""."""
        question = _PROBE_CHAT.beginning(1)
        if self.write(question, generate=True) != self.write(question) or not self.prompt:
            return ""
        _logger.warning(
            "%s writes no prompt for generation: %r before each answer is not learned, so it must be written "
            "before the model answers",
            self.name,
            self.prompt,
        )
        return self.prompt

    @cached_property
    def prompt(self) -> str:
        """Template text before an answer: the generation prompt, or else the header. The header is the common
        beginning of two different answers. Whitespace before the words belongs to the words, as LLaMA 2's
        tokenizer has them."""
        question = _PROBE_CHAT.beginning(1)
        told, prompt = self.write(question), self.write(question, generate=True)
        answers = [self.write(MarkedChat([PROBE[0], answer], None, _PROBE_CHAT.where)) for answer in _ANSWERS]
        if prompt != told and answers[0].startswith(prompt):
            return prompt.removeprefix(told)
        header = os.path.commonprefix([answer.removeprefix(told) for answer in answers]).rstrip(" ")
        return header if header.strip() else ""

    @cached_property
    def _end_token(self) -> str:
        """Special tokens that end an answer, whether a question follows or not. They include neither the
        question's header nor tokens that end only the whole conversation."""
        ends = [self._after_answer([]), self._after_answer([PROBE[0]])]
        found = [*self._special.finditer(os.path.commonprefix([end for end in ends if end]))]
        if not found:
            raise self._endless(_PROBE_CHAT.where)
        return ends[0][found[0].start() : found[-1].end()]

    def _after_answer(self, more: list[Message]) -> str:
        """Return the template's text after the probe's answer if messages follow; "" if it refuses them."""
        try:
            text = self.write(MarkedChat([*PROBE, *more], None, _PROBE_CHAT.where))
        except DataError:
            if not more:
                raise
            return ""
        return text.rpartition(PROBE[1]["content"])[2]

    def _endless(self, where: str) -> DataError:
        return DataError(
            f"{where}: {self.name} ends the assistant's turn without a special token, so the model would "
            f"not learn to stop; {CURE}"
        )

    @contextmanager
    def _refusing(self, chat: MarkedChat) -> Iterator[None]:
        try:
            yield
        except TemplateError as error:
            raise DataError(f"{chat.where}: {self.name} refuses the conversation: {error!s:.500}") from error
        except Exception as error:  # noqa: BLE001 - the template is a program
            reason = f"{type(error).__name__}: {error!s:.500}"
            raise DataError(f"{chat.where}: {self.name} fails: {reason}; {FOREIGN_CURE}") from error

    def _check_length(self, chat: MarkedChat, text: str) -> None:
        # Most texts are shorter than the smallest limit, and counting a row's characters takes time.
        if len(text) > _FRAME_LENGTH and len(text) > chat.longest_text:
            raise DataError(
                f"{chat.where}: {self.name} writes {len(text)} characters, expected at most "
                f"{chat.longest_text} for these {len(chat.messages)} messages; {FOREIGN_CURE}"
            )
