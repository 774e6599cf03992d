"""Renders rows as samples: lists of spans, in which the assistant's words are trained (see turns.py).

A chat template is code that comes with a tokenizer, so it runs in other processes (see bounded_process.py).
"""

from __future__ import annotations

from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerBase

from patch.config.schema import DataConfig
from patch.data.formats.turns import PLAIN, Conversation, Message, Text
from patch.data.rendering.bounded_process import BoundedMap, ChildEndedError
from patch.data.rendering.spans import Span, SpecialTokenMarker
from patch.data.rendering.template import FOREIGN_CURE, PROBE, MarkedChat, Template
from patch.data.rendering.turns import samples_of, says_something
from patch.data.tokenizer import backend_of, special_tokens
from patch.errors import DataError

Samples: TypeAlias = list[list[Span]]

_PROBE = Conversation(PROBE, None, (True, True), "chat template")


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id of the token that ends an answer, or None if no chat template can be used."""
    try:
        ((*_, answer),) = ChatRenderer(tokenizer).render(_PROBE)
    except DataError:
        return None
    ending = [token for token in special_tokens(tokenizer) if answer.text.endswith(token)]
    return tokenizer.get_vocab()[max(ending, key=len)]


class ChatRenderer:
    """Renderer of conversations with a tokenizer's chat template, and of plain texts without one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: DataConfig = PLAIN) -> None:
        self._data = data
        self._marker = SpecialTokenMarker(special_tokens(tokenizer))
        self._tokenizer = tokenizer
        self._bos = _bos_of_texts(tokenizer)
        self._template = Template(tokenizer)
        self._is_probed = False

    def render(self, row: Conversation | Text) -> Samples:
        """Return the samples of one row, made in a separate process; see `samples`."""
        ((_, (samples,)),) = BoundedMap(self.samples, error=self.child_error)([[row]])
        return samples

    def child_error(self, error: ChildEndedError) -> DataError:
        """Return the error for an item (it has a `where`) whose template or tokenizer ended the process. If
        memory is short, the kernel may kill this process although another process needs the memory."""
        if error.was_killed:
            return DataError(
                f"{error.item.where}: the process that tokenizes this row was killed, perhaps because the "
                "machine has no memory left; expected fewer processes that tokenize, or more free memory",
                field="data_workers",
            )
        both = f"{self._template.name}, or the tokenizer {self._tokenizer.name_or_path},"
        return DataError(f"{error.item.where}: {both} {error}; {FOREIGN_CURE}")

    def samples(self, row: Conversation | Text) -> Samples:
        """Return the samples of one row: usually one, or none if there are no trained tokens.

        There are several samples if the template writes earlier turns differently once later turns follow.
        The spans of a sample, concatenated, are the text up to the last trained turn. A turn without words is
        context only.

        This runs the template, so call it where time and memory are bounded. Before the first conversation,
        the template is tried on a short probe.

        Raises:
            DataError: the template fails, refuses a conversation, loses a part of it, does not let an answer
                be separated from its prompt, or ends a turn without a special token.
        """
        if isinstance(row, Text):
            return self._text_samples(row)
        if not self._is_probed:
            self._is_probed = True
            self.samples(_PROBE)
        turns = self._turns(row)
        if not turns:
            return []
        end = turns[-1] + 1
        messages = [_normal(message) for message in row.messages[:end]]
        marked = MarkedChat(self._marked(messages), self._marked(row.tools or None), row.where)
        samples = samples_of(self._template, marked, turns)
        return [*map(_joined, samples)] if row.is_answer else samples

    @property
    def headers(self) -> tuple[str, str]:
        """Template text before a question that follows an answer, and before an answer; "" if unknown. This
        runs the template in this process, whose time and memory must be bounded."""
        return self._template.question_header, self._template.prompt

    def holds_special_token(self, row: Conversation | Text) -> bool:
        """Return whether a text of the row spells out a special token."""
        parts = [*self._words(row)] if isinstance(row, Text) else [row.messages, row.tools]
        return self._marker.is_in(parts)

    def _turns(self, row: Conversation) -> list[int]:
        answers = [index for index, message in enumerate(row.messages) if message["role"] == "assistant"]
        first = 0
        if self._data.train_on == "last" and answers:
            users = [index for index in range(answers[-1]) if row.messages[index]["role"] == "user"]
            first = max(users, default=0)
        return [
            index
            for index in answers
            if index >= first and row.learned[index] and says_something(row.messages[index])
        ]

    def _text_samples(self, row: Text) -> Samples:
        if self._tokenizer.eos_token is None:
            raise DataError(
                f"{row.where}: the tokenizer {self._tokenizer.name_or_path} has no eos token, which "
                "ends a text; expected one in its tokenizer_config.json",
                field="tokenizer_name_or_path",
            )
        prompt, words = self._words(row)
        if not words.strip():
            return []
        answer = Span(self._marked(words) + self._tokenizer.eos_token, True, begins_text=not prompt)
        context = [Span(self._marked(prompt), False, begins_text=True)] if prompt else []
        return [[*([Span(self._bos, False)] if self._bos else []), *context, answer]]

    def _words(self, row: Text) -> tuple[str, str]:
        """Return prompt ("" if there is none) and text, without bos and eos tokens, which follow later."""
        text = row.text.removesuffix(self._tokenizer.eos_token or "")
        if row.prompt:
            return row.prompt.removeprefix(self._bos), text
        return "", text.removeprefix(self._bos)

    def _marked(self, value: Any) -> Any:
        return value if self._data.allow_special_tokens else self._marker.marked(value)


def _bos_of_texts(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the bos token if the tokenizer writes it before a text, else ""."""
    backend = backend_of(tokenizer)
    # Not `tokenizer("")`: it starts the threads of tokenizers, which do not survive a fork.
    ids = [] if backend is None else backend.encode("").ids
    is_written = tokenizer.bos_token is not None and ids[:1] == [tokenizer.bos_token_id]
    return str(tokenizer.bos_token) if is_written else ""


def _joined(spans: list[Span]) -> list[Span]:
    """Join all spans from the first trained span to the end into one trained span."""
    begin = next(index for index, span in enumerate(spans) if span.learned)
    return [*spans[:begin], spans[begin]._replace(text="".join(span.text for span in spans[begin:]))]


def _normal(message: Message) -> Message:
    """Return the message as templates expect it: a text as content, and no keys without a value."""
    kept = {key: value for key, value in message.items() if value is not None and value != []}
    return {**kept, "content": kept.get("content", "")}
