"""Templates of tasks and chats, rendered in jinja's sandbox by a process with bounds.

lm-eval renders templates in its own process, those of tasks without a sandbox. Here a `bounded_process`
renders, which bounds time, memory and output. Each text is rendered once and kept for later evaluations.
"""

from __future__ import annotations

import json
from functools import cache, partial
from typing import Any

from jinja2 import BaseLoader, StrictUndefined, Template, TemplateError
from jinja2.sandbox import SandboxedEnvironment
from lm_eval import utils
from transformers import PreTrainedTokenizerBase

from patch.data.rendering.bounded_process import BoundedMap, ChildEndedError
from patch.errors import DataError

_MOST_CHARACTERS = 1 << 20
"""The most characters that a template may write for one row."""


class Templates:
    """Renders templates of tasks and the tokenizer's chat template; its process lives with this object."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._process = BoundedMap(partial(_render, tokenizer))
        self._texts: dict[tuple[str | None, str], str] = {}

    def chat(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        """Render a conversation; without a generation prompt, the last message stays open for continuation.

        Raises:
            DataError: see `render`.
        """
        end = "add_generation_prompt" if add_generation_prompt else "continue_final_message"
        return self.render(None, {"conversation": messages, end: True})

    def render(self, template: str | None, doc: dict[str, Any]) -> str:
        """Render a template for a row, in place of lm-eval's `apply_template`.

        Raises:
            DataError: the template fails, or exceeds the bounds.
        """
        key = template, json.dumps(doc, default=str, sort_keys=True)
        if key not in self._texts:
            try:
                ((_, (text,)),) = self._process([[(template, dict(doc))]])
            except ChildEndedError as error:
                raise _refusal(template, str(error)) from error
            except (MemoryError, TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
                raise _refusal(template, f"{type(error).__name__}: {error}") from error
            self._texts[key] = text
        return self._texts[key]


def _refusal(template: str | None, reason: str) -> DataError:
    if template is None:
        return DataError(f"the chat template, for a task: {reason:.500}", field="chat_template")
    return DataError(f"a task's template {template!r:.200}: {reason:.500}", field="eval_tasks_path")


def _render(tokenizer: PreTrainedTokenizerBase, work: tuple[str | None, dict[str, Any]]) -> str:
    (template, row), parts, length = work, [], 0
    for part in [_chat(tokenizer, **row)] if template is None else _compiled(template).generate(**row):
        length += len(part)
        if length > _MOST_CHARACTERS:
            raise ValueError(f"writes more than {_MOST_CHARACTERS} characters for a row")
        parts.append(part)
    return "".join(parts)


def _chat(tokenizer: PreTrainedTokenizerBase, conversation: list[dict[str, str]], **options: Any) -> str:
    """Render a conversation; drop a system message that the template refuses, like lm-eval."""
    try:
        return str(tokenizer.apply_chat_template(conversation, tokenize=False, **options))
    except TemplateError:
        if conversation[0]["role"] != "system":
            raise
        return _chat(tokenizer, conversation[1:], **options)


@cache
def _compiled(template: str) -> Template:
    """Compile a template in an environment like lm-eval's, but sandboxed."""
    environment = SandboxedEnvironment(
        loader=BaseLoader(), undefined=StrictUndefined, keep_trailing_newline=True
    )
    environment.filters["regex_replace"] = utils.regex_replace
    return environment.from_string(template)
