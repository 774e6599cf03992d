"""Recognises the format of a row by its keys, and converts the row to a conversation or a text.

    {"messages": [...]}, {"conversations": [...]}, {"conversation": [...]}        see turns.py
    {"instruction": ..., "input": ..., "output": ..., "history": [[question, answer], ...]}     alpaca
    {"query": ..., "response": ...}          the answer may also be `content` (Pai-Megatron-Patch)
    {"prompt": ..., "completion": ...}       texts, or lists of messages; only the completion is learned
    {"text": ...}                            learned as a whole, without a template

`system` and `tools` may stand beside each but the last. Each row is looked at on its own. What would change a
row's meaning and is not supported is refused by name; other keys are ignored.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

from patch.config.choices import InputJoin
from patch.config.data_spec import COLUMNS_OF_TURNS
from patch.data.formats.contents import read_tools
from patch.data.formats.keys import (
    MISSPELLED,
    as_json,
    first_key,
    is_absent,
    missing_keys,
    present,
    quoted,
    rename,
    text_of,
)
from patch.data.formats.turns import PLAIN, Conversation, FormatOptions, Text, Turn, read_turns
from patch.errors import DataError

MESSAGES = ("messages", "conversations", "conversation")
PROMPTS = ("instruction", "query", "prompt")
_ANSWERS = ("output", "response", "completion", "content")
_SYSTEMS = ("system", "system_prompt")
_TOOLS = ("tools", "functions")
KNOWN = [*MESSAGES, *PROMPTS, *_ANSWERS, *_SYSTEMS, *_TOOLS, "input", "history", "text"]
_EXPECTED = (
    "messages (or conversations); or instruction (or query, prompt) and output (or response, completion, "
    "content); or text; where the rows have other names: --columns instruction=question,output=answer"
)
_OPTIONAL = ("input", "history", *_SYSTEMS)
_JOINS = {"newline": "\n", "empty": ""}

_NOT_SUPPORTED = {
    **dict.fromkeys(
        ("chosen", "rejected", "rejected_response", "chosen_messages", "rejected_messages", "kto_tag"),
        "fine-tuning would learn bad answers too; --objective dpo learns from chosen and rejected",
    ),
    **dict.fromkeys(("images", "videos", "audios", "image", "video", "audio"), "only text can be trained"),
    "chat_template_kwargs": "every row is written by the same template",
}


def to_conversation(row: dict[str, Any], where: str, options: FormatOptions = PLAIN) -> Conversation | Text:
    """The conversation of one row, in the form that chat templates take; or the text of a row of `text`.

    An assistant's message without words and without calls stays as context and is not learned. Where no
    message is learned, `learned` is False throughout.

    Args:
        row: one object of the file.
        where: file and row, for error messages.
        options: what the user says about the rows.
    Raises:
        DataError: keys are missing (the message says what was found and expected, and the nearest key) or do
            not hold text; a role is unknown; somebody else than the user speaks first; or the row asks for
            something that is not supported.
    """
    of_row, of_turns = split_columns(options.columns)
    if _is_of_another_shape(row, of_row):
        of_row = {}
    row = rename(row, of_row, where)
    key = _format_key(row, of_row)
    refuse_others(row, where)
    if key is None:
        raise DataError(f"{where}: {missing_keys(row, _EXPECTED, KNOWN)}")
    _refuse_misspelled(row, where)
    if key == "text":
        return Text(text_of(row, key, where), where)
    if key in MESSAGES:
        turns = read_turns(row[key], key, where, of_turns)
    else:
        turns = _from_prompt(row, key, where, of_turns, options.alpaca_input_join)
    return conversation_of(turns, row, where)


def split_columns(columns: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The user's names of a row's keys, and of those inside its turns."""
    of_turns = {ours: name for ours, name in columns.items() if ours in COLUMNS_OF_TURNS}
    return {ours: name for ours, name in columns.items() if ours not in of_turns}, of_turns


def _is_of_another_shape(row: Mapping[str, Any], columns: Mapping[str, str]) -> bool:
    """Whether a row has none of the columns and is understood without them: from another file of a blend."""
    deciding = columns.keys() & {*MESSAGES, *PROMPTS, *_ANSWERS, "text"}
    return bool(deciding) and set(columns.values()).isdisjoint(row) and _format_key(row, {}) is not None


def _format_key(row: Mapping[str, Any], columns: Mapping[str, str]) -> str | None:
    """The key that decides the format: one that the user has named, else the first of ours; None: unknown."""
    prompts = PROMPTS if first_key(row, _ANSWERS) is not None else ()
    candidates = [*MESSAGES, *prompts, "text"]
    named = [key for key in candidates if key in columns]
    if not named and prompts and not columns.keys().isdisjoint(_ANSWERS):
        named = list(prompts)
    return first_key(row, named) or first_key(row, candidates)


def refuse_others(row: Mapping[str, Any], where: str, read: Collection[str] = ()) -> None:
    """Refuse a row that asks for what is not supported.

    Args:
        row: the row.
        where: file and row, for messages.
        read: keys that are read here.
    Raises:
        DataError: it has such a key.
    """
    for key in present(row, _NOT_SUPPORTED.keys() - set(read)):
        raise DataError(f"{where}: key {key} is not supported: {_NOT_SUPPORTED[key]}")
    if isinstance(row.get("label"), bool) and ("completion" in row or "messages" in row):
        raise DataError(f"{where}: key label is not supported: {_NOT_SUPPORTED['kto_tag']}")


def _refuse_misspelled(row: Mapping[str, Any], where: str) -> None:
    """Refuse a key that means one of the optional ones: what stands under it would not be learned."""
    for key in row:
        meant = _meant(key)
        if meant and meant not in row and not is_absent(row[key]):
            raise DataError(
                f"{where}: key {key} is unknown, did you mean {meant}?; rename it, or --columns "
                f"{meant}={key}, or take it out of the rows"
            )


@lru_cache(maxsize=1024)  # the rows of a file have the same keys
def _meant(key: str) -> str:
    if key in KNOWN:
        return ""
    return next(iter(difflib.get_close_matches(key, _OPTIONAL, 1, MISSPELLED)), "")


def _from_prompt(
    row: Mapping[str, Any], key: str, where: str, columns: Mapping[str, str], join: InputJoin
) -> list[Turn]:
    """The turns of a row with a prompt and an answer; each is a text or a list of messages."""
    answer_key = first_key(row, _ANSWERS)
    assert answer_key is not None, "_format_key asks for both"
    prompt = of_prompt(row, key, where, columns, join)
    if isinstance(row[answer_key], list):
        return [*prompt, *read_turns(row[answer_key], answer_key, where, columns)]
    return [*prompt, _assistant(text_of(row, answer_key, where))]


def of_prompt(
    row: Mapping[str, Any], key: str, where: str, columns: Mapping[str, str], join: InputJoin
) -> list[Turn]:
    """The turns of a row up to its question, which is a text or a list of messages.

    Args:
        row: the row.
        key: the prompt's key.
        where: file and row, for messages.
        columns: the user's names for the role and the content of a message.
        join: what stands between an instruction and its input.
    """
    has_input = not is_absent(row.get("input")) and text_of(row, "input", where).strip()
    if isinstance(row[key], list) and not has_input:
        prompt = [turn._replace(learned=False) for turn in read_turns(row[key], key, where, columns)]
    else:
        parts = [text_of(row, key, where), row["input"] if has_input else ""]
        prompt = [_user(_JOINS[join].join(part for part in parts if part))]
    return [*_history(row, where), *prompt]


def _history(row: Mapping[str, Any], where: str) -> list[Turn]:
    """Earlier turns: pairs of a question and its answer, which is learned too."""
    history = as_json(row.get("history"))
    if is_absent(history):
        return []
    turns = []
    for number, pair in enumerate(history if isinstance(history, list) else [history], start=1):
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise DataError(
                f"{where}: history: {number}: got {quoted(pair)}, expected a list of two texts, the user's "
                "and the assistant's"
            )
        turns += [_user(pair[0]), _assistant(pair[1])]
    return turns


def _system(row: Mapping[str, Any], turns: list[Turn], where: str) -> list[Turn]:
    """The system message that stands beside the turns, unless they begin with the same one."""
    key = first_key(row, _SYSTEMS)
    if key is None or is_absent(row[key]) or not (system := text_of(row, key, where)).strip():
        return []
    if turns and turns[0].message["role"] == "system":
        if turns[0].message["content"].strip() not in (system.strip(), ""):
            raise DataError(
                f"{where}: {key}: got {system!r:.60}, but message 1 is another system message; expected one"
            )
        return []
    return [Turn({"role": "system", "content": system}, False)]


def conversation_of(turns: list[Turn], row: Mapping[str, Any], where: str) -> Conversation:
    """The conversation of turns, and of the system message and the tools that stand beside them.

    Args:
        turns: of the row.
        row: the row.
        where: file and row, for messages.
    Raises:
        DataError: somebody else than the user speaks first, or system message or tools stand there twice.
    """
    turns = [*_system(row, turns, where), *turns]
    opening = next((turn.message["role"] for turn in turns if turn.message["role"] != "system"), "nobody")
    if opening != "user":
        raise DataError(
            f"{where}: {opening} speaks first, expected the user; what has no question can be a row of `text`"
        )
    tools = _tools(row, turns, where)
    # A system message of tools alone says nothing.
    turns = [
        turn
        for turn in turns
        if not (turn.tools and turn.message["role"] == "system" and not turn.message["content"].strip())
    ]
    return Conversation([turn.message for turn in turns], tools, tuple(turn.learned for turn in turns), where)


def _tools(row: Mapping[str, Any], turns: list[Turn], where: str) -> list[dict[str, Any]] | None:
    """The tools beside the messages, or in parts of their contents."""
    key = first_key(row, _TOOLS)
    beside = None if key is None else read_tools(row[key], f"{where}: {key}")
    within = [(number, turn.tools) for number, turn in enumerate(turns, start=1) if turn.tools]
    if beside and within:
        raise DataError(
            f"{where}: tools: stands beside the messages and in message {within[0][0]}; expected it once"
        )
    return beside or [tool for _, tools in within for tool in tools] or None


def _user(text: str) -> Turn:
    return Turn({"role": "user", "content": text}, False)


def _assistant(text: str) -> Turn:
    return Turn({"role": "assistant", "content": text}, bool(text.strip()))
