"""Recognises the format of a row by its keys, and converts the row to a conversation or a text.

    {"messages": [...]}, {"conversations": [...]}, {"conversation": [...]}        see turns.py
    {"instruction": ..., "input": ..., "output": ..., "history": [[question, answer], ...]}     alpaca
    {"query": ..., "response": ...}          the answer may also be `content` (Pai-Megatron-Patch)
    {"prompt": ..., "completion": ...}       texts, or lists of messages; only the completion is learned
    {"text": ...}                            learned as a whole, without a template

`to_pair` recognises a preferred and another answer; of both only what follows the prompt is learned:

    {"prompt": [messages], "chosen": [messages], "rejected": [messages]}       TRL's, with a chat template
    {"prompt": "...", "chosen": "...", "rejected": "..."}                      TRL's, plain texts without one
    {"chosen": [messages], "rejected": [messages]}     whole conversations: what both begin with is the prompt
    {"chosen": "...", "rejected": "..."}               transcripts as Anthropic's HH has them (`TURN`)
    {"messages" or "conversations": [...], "chosen": ..., "rejected": ...}     LLaMA-Factory's, and
    {"instruction": ..., "input": ..., "history": ..., "chosen": ..., "rejected": ...}    its alpaca's: an
                                                       answer is a message, a list of messages, or a text

`system` and `tools` may stand beside each but plain texts. Each row is looked at on its own. What would
change a row's meaning and is not supported is refused by name; other keys are ignored.

Source of pairs: `extract_prompt` and `DPOTrainer` of TRL 1.16.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
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

_MESSAGES = ("messages", "conversations", "conversation")
_PROMPTS = ("instruction", "query", "prompt")
_ANSWERS = ("output", "response", "completion", "content")
_SYSTEMS = ("system", "system_prompt")
_TOOLS = ("tools", "functions")
_KNOWN = [*_MESSAGES, *_PROMPTS, *_ANSWERS, *_SYSTEMS, *_TOOLS, "input", "history", "text"]
_EXPECTED = (
    "messages (or conversations); or instruction (or query, prompt) and output (or response, completion, "
    "content); or text; where the rows have other names: --columns instruction=question,output=answer"
)
_PAIR = ("chosen", "rejected")
_ANSWER_BEGINS = "\n\nAssistant:"
"""In a transcript."""
_EXPECTED_PAIR = (
    "chosen and rejected, beside a prompt (or messages, instruction) or with what both begin with; where the "
    "rows have other names: --columns chosen=better,rejected=worse"
)
_OPTIONAL = ("input", "history", *_SYSTEMS)
_JOINS = {"newline": "\n", "empty": ""}

_NOT_SUPPORTED = {
    **dict.fromkeys(
        ("chosen", "rejected", "rejected_response", "chosen_messages", "rejected_messages", "kto_tag"),
        "fine-tuning would learn bad answers too; --objective dpo learns from chosen and rejected",
    ),
    **dict.fromkeys(("images", "videos", "audios", "image", "video", "audio"), "only text can be trained"),
    "chat_template_kwargs": "every row is written by the same template (--chat-template-kwargs)",
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
            not hold text; a role is unknown; another role than the user speaks first; or the row asks for
            something that is not supported.
    """
    of_row, of_turns = _split_columns(options.columns)
    if _is_of_another_shape(row, of_row):
        of_row = {}
    row = rename(row, of_row, where)
    key = _format_key(row, of_row)
    _refuse(row, where)
    if key is None:
        raise DataError(f"{where}: {missing_keys(row, _EXPECTED, _KNOWN)}")
    _refuse_misspelled(row, where)
    if key == "text":
        return Text(text_of(row, key, where), where)
    if key in _MESSAGES:
        turns = read_turns(row[key], key, where, of_turns)
    else:
        turns = _from_prompt(row, key, where, of_turns, options.alpaca_input_join)
    return _conversation(turns, row, where)


def _split_columns(columns: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The user's names of a row's keys, and of those inside its turns."""
    of_turns = {ours: name for ours, name in columns.items() if ours in COLUMNS_OF_TURNS}
    return {ours: name for ours, name in columns.items() if ours not in of_turns}, of_turns


def to_pair(
    row: dict[str, Any], where: str, options: FormatOptions = PLAIN
) -> tuple[Conversation | Text, Conversation | Text]:
    """The preferred and the other conversation of a row, or text; of each only the answer is learned.

    Args:
        row: one object of the file.
        where: file and row, for error messages.
        options: what the user says about the rows.
    Raises:
        DataError: as `to_conversation`; or the row has no two answers, they are of different forms, or two
            texts alone are no transcripts with a common beginning.
    """
    of_row, of_turns = _split_columns(options.columns)
    if not set(of_row.values()).isdisjoint(row) or not row.keys() >= set(_PAIR):
        row = rename(row, of_row, where)
    _refuse(row, where, _PAIR)
    if missing := [name for name in _PAIR if name not in row]:
        found = missing_keys(row, _EXPECTED_PAIR, [*_KNOWN, *_PAIR])
        raise DataError(f"{where}: --objective dpo: no key {' and no '.join(missing)}: {found}")
    key = next((name for name in (*_MESSAGES, *_PROMPTS) if not is_absent(row.get(name))), None)
    are_texts = [isinstance(row[name], str) for name in _PAIR]
    if all(are_texts) and (key is None or key == "prompt" and isinstance(row[key], str)):
        return _plain_texts(row, key, where)
    if any(are_texts) and not all(are_texts):
        first, second = (quoted(row[name]) for name in _PAIR)
        raise DataError(f"{where}: got chosen {first} and rejected {second}, expected one form")
    answers = [_turns_of(row, name, where, of_turns) for name in _PAIR]
    is_whole = any(turns[:1] and turns[0].message["role"] != "assistant" for turns in answers)
    if key is None or is_whole and not isinstance(row.get("prompt"), list):
        size = _num_common(*answers)
        prompt, answers = answers[0][:size], [turns[size:] for turns in answers]
    elif key in _MESSAGES:
        prompt = read_turns(row[key], key, where, of_turns)
    else:
        prompt = _prompt_turns(row, key, where, of_turns, options.alpaca_input_join)
    context = [turn._replace(learned=False) for turn in prompt]
    chosen, rejected = (_conversation([*context, *turns], row, where) for turns in answers)
    return replace(chosen, is_answer=True), replace(rejected, is_answer=True)


def _plain_texts(row: Mapping[str, Any], key: str | None, where: str) -> tuple[Text, Text]:
    """Two texts, each behind a prompt that both share: the key's, or of transcripts the common beginning."""
    chosen, rejected = (text_of(row, name, where) for name in _PAIR)
    if key is not None:
        whole = Text(chosen, where, row[key])
        return whole, replace(whole, text=rejected)
    common = os.path.commonprefix([chosen, rejected])
    size = common.rfind(_ANSWER_BEGINS) + len(_ANSWER_BEGINS)
    if _ANSWER_BEGINS not in common:
        raise DataError(
            f"{where}: chosen and rejected are texts without a prompt, expected the key prompt (or "
            f"instruction, messages), or two transcripts with a question and {_ANSWER_BEGINS!r} in common"
        )
    whole = Text(chosen[size:], where, chosen[:size])
    return whole, replace(whole, text=rejected[size:])


def _turns_of(row: Mapping[str, Any], name: str, where: str, columns: Mapping[str, str]) -> list[Turn]:
    """The messages of an answer that is a text, a message or a list of messages."""
    said = row[name]
    if isinstance(said, str):
        said = [{"role": "assistant", "content": said}]
        columns = {}
    return read_turns([said] if isinstance(said, dict) else said, f"{name}", f"{where}: {name}", columns)


def _num_common(first: list[Turn], second: list[Turn]) -> int:
    """How many messages both begin with; at least one of each is its answer."""
    most = min(len(first), len(second)) - 1
    return next((n for n in range(most) if first[n].message != second[n].message), max(most, 0))


def _is_of_another_shape(row: Mapping[str, Any], columns: Mapping[str, str]) -> bool:
    """Whether a row has none of the columns and is understood without them: from another file of a blend."""
    deciding = columns.keys() & {*_MESSAGES, *_PROMPTS, *_ANSWERS, "text"}
    return bool(deciding) and set(columns.values()).isdisjoint(row) and _format_key(row, {}) is not None


def _format_key(row: Mapping[str, Any], columns: Mapping[str, str]) -> str | None:
    """The key that decides the format: one that the user has named, else the first of ours; None: unknown."""
    prompts = _PROMPTS if first_key(row, _ANSWERS) is not None else ()
    candidates = [*_MESSAGES, *prompts, "text"]
    named = [key for key in candidates if key in columns]
    if not named and prompts and not columns.keys().isdisjoint(_ANSWERS):
        named = list(prompts)
    return first_key(row, named) or first_key(row, candidates)


def _refuse(row: Mapping[str, Any], where: str, read: Collection[str] = ()) -> None:
    """Refuse a row that asks for what is not supported; `read` are keys that are."""
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
    if key in _KNOWN:
        return ""
    return next(iter(difflib.get_close_matches(key, _OPTIONAL, 1, MISSPELLED)), "")


def _from_prompt(
    row: Mapping[str, Any], key: str, where: str, columns: Mapping[str, str], join: InputJoin
) -> list[Turn]:
    """The turns of a row with a prompt and an answer; each is a text or a list of messages."""
    answer_key = first_key(row, _ANSWERS)
    assert answer_key is not None, "_format_key asks for both"
    prompt = _prompt_turns(row, key, where, columns, join)
    if isinstance(row[answer_key], list):
        return [*prompt, *read_turns(row[answer_key], answer_key, where, columns)]
    return [*prompt, _assistant(text_of(row, answer_key, where))]


def _prompt_turns(
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


def _conversation(turns: list[Turn], row: Mapping[str, Any], where: str) -> Conversation:
    """The conversation of turns, and of the system message and the tools that stand beside them."""
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
