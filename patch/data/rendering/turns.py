"""Splits the text of a conversation into spans with and without a loss.

Answers are found in one of two ways. A template with `{% generation %}` marks them itself. For any other
template, an answer is the difference to the text without it. The prompt for the answer must be the beginning
of the text with the answer.

The loss covers the assistant's words and the token that ends the turn, so that the model learns to stop. The
header before the words is not trained, because generation starts after it. The template's text after the turn
(such as ChatML's line break) is not trained either.

Some templates write earlier turns differently once later turns follow (Qwen 3 drops their thoughts). The
conversation then becomes several samples, each with the text that generation would see.

A conversation is refused if the template leaves out a part of it, because the part would be lost silently.
Many templates write neither tools nor their results.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from patch.data.formats.turns import Message
from patch.data.rendering.spans import Span, texts_in
from patch.data.rendering.template import CURE, MarkedChat, Template
from patch.errors import DataError

MOST_SAMPLES = 64
"""Most samples of one conversation; each has the whole text before its answer."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
_END_OF_THOUGHTS = "</think>"
"""End of thoughts within the words; templates separate the thoughts."""
_WRITING_CURE = "use a chat template that writes it, such as that of the instruct model (--chat-template)"


def samples_of(template: Template, chat: MarkedChat, turns: Sequence[int]) -> list[list[Span]]:
    """Return the samples of a conversation.

    Args:
        chat: its last message is the last trained turn.
        turns: indices of the trained assistant messages; at least one.
    Raises:
        DataError: prompt and answer cannot be separated; the answer has no end; the template loses something;
            or there are too many samples.
    """
    marks = template.marks_answers(chat)
    samples = [_from_blocks(template, chat, turns)] if marks else _from_prefixes(template, chat, turns)
    is_all_learned = len(turns) == sum(message["role"] == "assistant" for message in chat.messages)
    return samples if is_all_learned else [_divided(template, spans) for spans in samples]


def _divided(template: Template, spans: list[Span]) -> list[Span]:
    """Split spans without a loss also where turns begin."""
    divided: list[Span] = []
    for span in spans:
        first, *others = [span.text] if span.learned else template.turns_of(span.text)
        divided += [span._replace(text=first), *(Span(text, False, begins_user_turn=True) for text in others)]
    return divided


def _from_blocks(template: Template, chat: MarkedChat, turns: Sequence[int]) -> list[Span]:
    """Return one sample, from a template that marks the assistant's words."""
    text, blocks = template.write_marked(chat)
    _check_row(template.name, chat, text)
    answers = [
        index
        for index, message in enumerate(chat.messages)
        if message["role"] == "assistant" and says_something(message)
    ]
    # A block of special tokens alone is an answer without words, or an eos token after the conversation.
    blocks = [(start, end) for start, end in blocks if template.has_words(text[start:end])]
    if len(blocks) != len(answers):
        bare = [index for index in answers if not template.has_words(words_of(chat.messages[index]))]
        if bare:
            raise DataError(
                f"{chat.where}: message {bare[0] + 1}: the answer is a special token and no words, expected "
                "words; without --allow-special-tokens it is text",
                field="allow_special_tokens",
            )
        raise DataError(
            f"{chat.where}: {template.name} has {len(blocks)} `{{% generation %}}` blocks for {len(answers)} "
            "answers, expected one per answer; choose another --chat-template",
            field="chat_template",
        )
    spans: list[Span] = []
    done = 0
    for index, (begin, end) in zip(answers, blocks, strict=True):
        if index in turns:
            start = template.begin_of_block(text, begin)
            _check_answer(template.name, chat, index, text[start:end])
            end = template.end_of_turn(text, start, end, chat.where)
            spans += [Span(text[done:start], False), Span(text[start:end], True)]
            done = end
    return spans


def _from_prefixes(template: Template, chat: MarkedChat, turns: Sequence[int]) -> list[list[Span]]:
    """Return the samples, from the text up to each turn. A new sample begins if earlier text has changed."""
    samples: list[list[Span]] = [[]]
    done = ""
    for index in turns:
        prompt, answer = _turn(template, chat, index)
        if not prompt.startswith(done):
            samples.append([])
            done = ""
        samples[-1] += [Span(prompt[len(done) :], False), Span(answer, True)]
        done = prompt + answer
        if len(samples) > MOST_SAMPLES:
            raise DataError(
                f"{chat.where}: {template.name} writes earlier turns differently after each question, so "
                f"every turn needs a sample of its own: more than {MOST_SAMPLES}; learn the last "
                "turn only (--train-on last), or use a template with {% generation %}",
                field="train_on",
            )
    return samples


def _turn(template: Template, chat: MarkedChat, index: int) -> tuple[str, str]:
    """Return the text up to an answer, and the answer with the token that ends it."""
    prompt = template.write(chat.beginning(index), generate=True) + template.header
    text = template.write(chat.beginning(index + 1))
    if not text.startswith(prompt):
        raise DataError(
            f"{chat.where}: message {index + 1}: {template.name} writes the text before the answer "
            f"differently from the prompt for it, so prompt and answer cannot be separated; {CURE}"
        )
    answer = text[len(prompt) : template.end_of_turn(text, len(prompt), len(text), chat.where)]
    _check_answer(template.name, chat, index, answer)
    if index == len(chat.messages) - 1:
        _check_row(template.name, chat, text)
    return prompt, answer


def words_of(message: Message) -> str:
    """Return the text of a message, stripped; the texts of a content in parts are concatenated."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return content.strip()


def says_something(message: Message) -> bool:
    """Return whether a message has words, thoughts or tool calls."""
    return bool(words_of(message) or message.get("tool_calls") or any(map(message.get, _REASONING)))


def _check_answer(name: str, chat: MarkedChat, index: int, answer: str) -> None:
    """Refuse an answer that lacks the last line of words, the thoughts or a tool call of its message."""
    message = chat.messages[index]
    # Templates may write thoughts, which stand before the words, in another way.
    last_line = words_of(message).rpartition("\n")[2].rpartition(_END_OF_THOUGHTS)[2].strip()
    if not _is_in(answer, last_line):
        raise _loss(name, chat, index, "what the assistant says", last_line)
    thoughts = next((message[key] for key in _REASONING if message.get(key)), "")
    if not _is_in(answer, thoughts):
        raise _loss(name, chat, index, "what the assistant thinks", thoughts)
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        for value in texts_in([function.get("name", ""), function.get("arguments")], keys=False):
            if not _is_in(answer, value):
                raise _loss(name, chat, index, "a call of a tool", value)


def _check_row(name: str, chat: MarkedChat, text: str) -> None:
    """Refuse a text that lacks the tools, the answers of tools or the system message."""
    for tool in chat.tools or ():
        tool_name = tool.get("function", tool).get("name", "")
        if not _is_in(text, tool_name):
            raise _loss(name, chat, None, "the tools", tool_name)
    for index, message in enumerate(chat.messages):
        if message["role"] not in ("user", "assistant") and not _is_in(text, words_of(message)):
            raise _loss(name, chat, index, f"what the {message['role']} says", words_of(message))


def _loss(name: str, chat: MarkedChat, index: int | None, what: str, value: str) -> DataError:
    place = chat.where if index is None else f"{chat.where}: message {index + 1}"
    return DataError(
        f"{place}: {name} does not write {what} ({value!r:.60}); {_WRITING_CURE}", field="chat_template"
    )


def _is_in(text: str, value: str) -> bool:
    """Return whether a text has a value as it is, in JSON, or in JSON within JSON."""
    for _ in range(3):
        if value.strip() in text:
            return True
        value = json.dumps(value, ensure_ascii=False)[1:-1]
    return False
