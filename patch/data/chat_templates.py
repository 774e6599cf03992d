"""Built-in chat templates for base models, and the choice of a tokenizer's template.

The built-in templates mark the assistant's words with `{% generation %}`. The chosen template becomes the
tokenizer's own and is exported with the model, because generation must write the same text as training.

Tools are written where model servers read a convention: Hermes' tags for `chatml`, Meta's JSON for `llama3`.
`alpaca` and `plain` write no tools.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from transformers import PreTrainedTokenizerBase

from patch.config.choices import BuiltInTemplate
from patch.config.data_spec import parse_template_kwargs
from patch.data.tokenizer import special_tokens
from patch.errors import DataError
from patch.logger import get_logger
from patch.storage.text_files import read_json, read_small

_logger = get_logger(__name__)

_LARGEST_FILE = 1 << 20

_ARGUMENTS = "(call.arguments if call.arguments is string else call.arguments | tojson)"

# Contents are trimmed as in the templates that Meta publishes, but no date and no system message is added.
_LLAMA3 = (
    "{{- bos_token }}"
    "{%- if tools %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content | trim + '\n\n' }}{%- endif %}"
    "{{- 'Functions that you can call:\n' }}"
    "{%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}"
    '{{- \'To call one, answer only with {"name": its name, "parameters": {...}}.<|eot_id|>\' }}'
    "{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{%- generation %}"
    "{{- message.content | trim }}"
    "{%- for call in message.tool_calls or [] %}"
    "{%- set call = call.function or call %}"
    "{{- '; ' if not loop.first or message.content | trim }}"
    '{{- \'{"name": "\' + call.name + \'", "parameters": \' + ' + _ARGUMENTS + " + '}' }}"
    "{%- endfor %}"
    "{{- '<|eot_id|>' }}"
    "{%- endgeneration %}"
    "{%- elif not (tools and loop.first and message.role == 'system') %}"
    "{%- set role = 'ipython' if message.role == 'tool' else message.role %}"
    "{{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
_CHATML = (
    "{{- bos_token }}"
    "{%- if tools %}"
    "{{- '<|im_start|>system\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}"
    "{{- 'Functions that you can call:\n<tools>\n' }}"
    "{%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}"
    "{{- '</tools>\nTo call one, write:\n<tool_call>\n' }}"
    '{{- \'{"name": its name, "arguments": {...}}\n</tool_call><|im_end|>\n\' }}'
    "{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{%- generation %}"
    "{{- message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    "{%- set call = call.function or call %}"
    "{{- '\n' if not loop.first or message.content }}"
    '{{- \'<tool_call>\n{"name": "\' + call.name + \'", "arguments": \' }}'
    "{{- " + _ARGUMENTS + " + '}\n</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>' }}"
    "{%- endgeneration %}"
    "{{- '\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{{- '<|im_start|>tool\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}"
    "{%- elif not (tools and loop.first and message.role == 'system') %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
_ALPACA = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message.role == 'system' %}"
    "{{- message.content + '\n\n' }}"
    "{%- elif message.role == 'user' %}"
    "{{- '### Instruction:\n' + message.content + '\n\n' }}"
    "{%- elif message.role == 'assistant' %}"
    "{{- '### Response:\n' }}"
    "{%- generation %}{{- message.content + eos_token }}{%- endgeneration %}"
    "{{- '\n\n' }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '### Response:\n' }}{%- endif %}"
)
_PLAIN = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}"
    "{%- generation %}{{- message.content + eos_token }}{%- endgeneration %}"
    "{%- elif message.role != 'tool' %}"
    "{{- message.content }}"
    "{%- endif %}"
    "{%- endfor %}"
)
BUILT_IN: dict[str, str] = {"chatml": _CHATML, "llama3": _LLAMA3, "alpaca": _ALPACA, "plain": _PLAIN}
LLAMA3_CHAT_TEMPLATE = BUILT_IN["llama3"]

_TOKENS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
}
"""Special tokens that a template writes. The other templates end an answer with the tokenizer's eos token."""
assert set(BUILT_IN) == set(get_args(BuiltInTemplate))


def ensure_chat_template(
    tokenizer: PreTrainedTokenizerBase, chosen: str | None = None, kwargs: str | None = None
) -> None:
    """Give the tokenizer the chosen chat template, which is exported with the tokenizer.

    If no template is chosen, the tokenizer keeps its own. A LLaMA-3 tokenizer without a template gets the
    built-in `llama3`. Any other tokenizer stays without a template, which suffices for plain texts.

    Args:
        chosen: name of a built-in template, or path of a Jinja file.
        kwargs: JSON object of variables, which the template sets if its caller does not.
    Raises:
        ConfigError: `kwargs` is not a JSON object of names.
        DataError: the tokenizer lacks a special token of the built-in template, or the file cannot be read.
    """
    _choose(tokenizer, chosen)
    begin = "".join(
        f"{{%- if {name} is not defined %}}{{%- set {name} = {value!a} %}}{{%- endif %}}"
        for name, value in parse_template_kwargs(kwargs).items()
    )
    text: Any = tokenizer.chat_template
    if begin and isinstance(text, dict):
        tokenizer.chat_template = {name: begin + own for name, own in text.items()}
    elif isinstance(text, str) and not text.startswith(begin):
        tokenizer.chat_template = begin + text


def _choose(tokenizer: PreTrainedTokenizerBase, chosen: str | None) -> None:
    if chosen is None:
        if tokenizer.chat_template is None and not _missing("llama3", tokenizer):
            tokenizer.chat_template = LLAMA3_CHAT_TEMPLATE
            _logger.info("the tokenizer has no chat template: the built-in llama3 is used, and exported")
        return
    if chosen not in BUILT_IN:
        tokenizer.chat_template = _read(Path(chosen))
        return
    if missing := _missing(chosen, tokenizer):
        fitting = [name for name in BUILT_IN if not _missing(name, tokenizer)]
        raise DataError(
            f"got {chosen}, but the tokenizer {tokenizer.name_or_path} has no special token "
            f"{' and no '.join(missing)}; expected a template whose special tokens it has: "
            f"{', '.join([*fitting, 'or a .jinja file'])}",
            field="chat_template",
        )
    tokenizer.chat_template = BUILT_IN[chosen]


def template_name(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the chat template's name for messages: the built-in name, or the file with the template."""
    text = tokenizer.chat_template
    for name, built_in in BUILT_IN.items():
        if text == built_in:
            return f"the built-in chat template {name}"
    folder = Path(tokenizer.name_or_path)
    with suppress(OSError, ValueError, AttributeError):
        if (file := folder / "chat_template.jinja").is_file() and read_small(file).decode() == text:
            return f"the chat template in {file}"
        if read_json(file := folder / "tokenizer_config.json").get("chat_template") == text:
            return f"the chat template in {file}"
    return "the chat template"


def _missing(name: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    if name not in _TOKENS:
        return [] if tokenizer.eos_token else ["eos token"]
    known = set(special_tokens(tokenizer))
    return [token for token in _TOKENS[name] if token not in known]


def _read(file: Path) -> str:
    try:
        return read_small(file, _LARGEST_FILE).decode()
    except (OSError, UnicodeDecodeError) as error:
        names = ", ".join(BUILT_IN)
        raise DataError(
            f"got {file}, which cannot be read ({error}), expected {names} or a Jinja file of UTF-8",
            field="chat_template",
        ) from error
