"""Recognises the format of a row by its keys, and converts the row to a conversation or a text.

    {"messages": [...]}, {"conversations": [...]}, {"conversation": [...]}        see turns.py
    {"instruction": ..., "input": ..., "output": ..., "history": [[question, answer], ...]}     alpaca
    {"query": ..., "response": ...}          the answer may also be `content` (Pai-Megatron-Patch)
    {"prompt": ..., "completion": ...}       texts, or lists of messages; only the completion is trained
    {"text": ...}                            trained as a whole, without a template

`to_pair` recognises a preferred and a rejected answer. Only the part after the prompt is trained:

    {"prompt": [messages], "chosen": [messages], "rejected": [messages]}       TRL's, with a chat template
    {"prompt": "...", "chosen": "...", "rejected": "..."}                      TRL's, plain texts without one
    {"chosen": [messages], "rejected": [messages]}     whole conversations: the common beginning is the prompt
    {"chosen": "...", "rejected": "..."}               transcripts as in Anthropic's HH (`_ANSWER_BEGINS`)
    {"messages" or "conversations": [...], "chosen": ..., "rejected": ...}     LLaMA-Factory's, and
    {"instruction": ..., "input": ..., "history": ..., "chosen": ..., "rejected": ...}    its alpaca's: an
                                                       answer is a message, a list of messages, or a text

`to_unpaired` recognises an answer and whether it is desirable. Only the completion is trained:

    {"prompt": ..., "completion": ..., "label": true or false}     TRL's; texts, or lists of messages

`system` and `tools` may stand beside each form except plain texts. The format of each row is recognised on
its own. Unsupported keys that would change a row's meaning are refused; other keys are ignored.

Source of pairs and labels: `extract_prompt`, `DPOTrainer` and `KTOTrainer` of TRL 1.16.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from patch.config.choices import RowKind
from patch.config.data_spec import COLUMNS_OF_TURNS, parse_columns
from patch.config.schema import DataConfig
from patch.data.formats.contents import read_tools
from patch.data.formats.keys import (
    MISSPELLED,
    first_key,
    is_absent,
    missing_keys,
    parse_json_text,
    present,
    quoted,
    rename,
    text_of,
)
from patch.data.formats.turns import PLAIN, Conversation, Text, Turn, read_turns
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
_UNPAIRED = ("prompt", "completion", "label")
_ANSWER_BEGINS = "\n\nAssistant:"
"""Begin of an answer in a transcript."""
_EXPECTED_PAIR = (
    "chosen and rejected, beside a prompt (or messages, instruction) or with what both begin with; where the "
    "rows have other names: --columns chosen=better,rejected=worse"
)
_EXPECTED_UNPAIRED = (
    "prompt, completion and label (true or false); where the rows have other names: --columns label=good"
)
_OPTIONAL = ("input", "history", *_SYSTEMS)
_JOINS = {"newline": "\n", "empty": ""}

_NOT_SUPPORTED = {
    **dict.fromkeys(
        ("chosen", "rejected", "rejected_response", "chosen_messages", "rejected_messages"),
        "this run would learn bad answers too; --objective dpo, orpo, simpo read chosen and rejected",
    ),
    "kto_tag": "this run would learn bad answers too; --objective kto reads prompt, completion and label",
    **dict.fromkeys(("images", "videos", "audios", "image", "video", "audio"), "only text can be trained"),
    "chat_template_kwargs": "every row is written by the same template (--chat-template-kwargs)",
}


def to_conversation(row: dict[str, Any], where: str, data: DataConfig = PLAIN) -> Conversation | Text:
    """Return the conversation of a row in the form that chat templates take, or the text of a row of `text`.

    A message without words and calls is context only. If no message is trained, all of `learned` is False.

    Args:
        where: file and row, for error messages.
    Raises:
        DataError: keys are missing (the message names the found, expected and nearest keys) or do not hold
            text; a role is unknown; another role than the user speaks first; or the row needs something
            unsupported.
    """
    of_row = _columns_of_row(data)
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
        turns = read_turns(row[key], key, where, data)
    else:
        turns = _from_prompt(row, key, where, data)
    return _conversation(turns, row, where)


def _columns_of_row(data: DataConfig) -> dict[str, str]:
    """Return the user's names of keys of a row; those inside its turns are for `read_turns`."""
    return {ours: name for ours, name in parse_columns(data.columns).items() if ours not in COLUMNS_OF_TURNS}


def to_pair(
    row: dict[str, Any], where: str, data: DataConfig = PLAIN
) -> tuple[Conversation | Text, Conversation | Text]:
    """Return the preferred and the rejected conversation or text of a row; only the answers are trained.

    Raises:
        DataError: as `to_conversation`; or an answer is missing, the answers are of different forms, or two
            texts without a prompt are not transcripts with a common beginning.
    """
    row = _renamed(row, where, data, _PAIR, _EXPECTED_PAIR)
    key = next((name for name in (*_MESSAGES, *_PROMPTS) if not is_absent(row.get(name))), None)
    are_texts = [isinstance(row[name], str) for name in _PAIR]
    if all(are_texts) and (key is None or key == "prompt" and isinstance(row[key], str)):
        return _plain_texts(row, key, where)
    if any(are_texts) and not all(are_texts):
        first, second = (quoted(row[name]) for name in _PAIR)
        raise DataError(
            f"{where}: chosen is {first} and rejected is {second}, expected both as texts, or both as lists "
            "of messages; convert one of them"
        )
    answers = [_turns_of(row, name, where, data) for name in _PAIR]
    is_whole = any(turns[:1] and turns[0].message["role"] != "assistant" for turns in answers)
    if key is None or is_whole and not isinstance(row.get("prompt"), list):
        size = _num_common_messages(*answers)
        prompt, answers = answers[0][:size], [turns[size:] for turns in answers]
    elif key in _MESSAGES:
        prompt = read_turns(row[key], key, where, data)
    else:
        prompt = _prompt_turns(row, key, where, data)
    context = [turn._replace(learned=False) for turn in prompt]
    chosen, rejected = (_conversation([*context, *turns], row, where) for turns in answers)
    return replace(chosen, is_answer=True), replace(rejected, is_answer=True)


def to_unpaired(
    row: dict[str, Any], where: str, data: DataConfig = PLAIN
) -> tuple[Conversation | Text, bool]:
    """Return the conversation or text of a row, and whether its answer is desirable; only that is trained.

    Raises:
        DataError: as `to_conversation`; or a key is missing, or the label is neither true nor false.
    """
    row = _renamed(row, where, data, _UNPAIRED, _EXPECTED_UNPAIRED)
    label = row["label"]
    if not isinstance(label, bool):
        raise DataError(f"{where}: label is {quoted(label)}, expected true or false; convert it")
    if isinstance(row["prompt"], str) and isinstance(row["completion"], str):
        return Text(text_of(row, "completion", where), where, row["prompt"]), label
    prompt = _prompt_turns(row, "prompt", where, data)
    context = [turn._replace(learned=False) for turn in prompt]
    whole = _conversation([*context, *_turns_of(row, "completion", where, data)], row, where)
    return replace(whole, is_answer=True), label


def read_row(
    kind: RowKind, row: dict[str, Any], where: str, data: DataConfig = PLAIN
) -> tuple[Sequence[Conversation | Text], bool]:
    """Return the conversations or texts of a row, and its label; False without one."""
    if kind == "pair":
        return to_pair(row, where, data), False
    if kind == "unpaired":
        answer, label = to_unpaired(row, where, data)
        return [answer], label
    return [to_conversation(row, where, data)], False


def _renamed(
    row: dict[str, Any], where: str, data: DataConfig, keys: Collection[str], expected: str
) -> dict[str, Any]:
    """Return a row with these keys under our names."""
    of_row = _columns_of_row(data)
    if not set(of_row.values()).isdisjoint(row) or not row.keys() >= set(keys):
        row = rename(row, of_row, where)
    _refuse(row, where, keys)
    if missing := [name for name in keys if name not in row]:
        found = missing_keys(row, expected, [*_KNOWN, *keys])
        raise DataError(f"{where}: no key {' and no '.join(missing)}: {found}")
    return row


def _plain_texts(row: Mapping[str, Any], key: str | None, where: str) -> tuple[Text, Text]:
    """Return two texts with a shared prompt: the row's prompt, or the common beginning of two transcripts."""
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


def _turns_of(row: Mapping[str, Any], name: str, where: str, data: DataConfig) -> list[Turn]:
    said = row[name]
    if isinstance(said, str):
        said = [{"role": "assistant", "content": said}]
        data = PLAIN
    return read_turns([said] if isinstance(said, dict) else said, f"{name}", f"{where}: {name}", data)


def _num_common_messages(first: list[Turn], second: list[Turn]) -> int:
    """Return how many messages both begin with. Each keeps at least one message as its answer."""
    most = min(len(first), len(second)) - 1
    return next((n for n in range(most) if first[n].message != second[n].message), max(most, 0))


def _is_of_another_shape(row: Mapping[str, Any], columns: Mapping[str, str]) -> bool:
    """Return whether a row has none of the columns and is readable without them: another file of a blend."""
    deciding = columns.keys() & {*_MESSAGES, *_PROMPTS, *_ANSWERS, "text"}
    return bool(deciding) and set(columns.values()).isdisjoint(row) and _format_key(row, {}) is not None


def _format_key(row: Mapping[str, Any], columns: Mapping[str, str]) -> str | None:
    """Return the key that decides the format (the user's before ours), or None if the format is unknown."""
    prompts = _PROMPTS if first_key(row, _ANSWERS) is not None else ()
    candidates = [*_MESSAGES, *prompts, "text"]
    named = [key for key in candidates if key in columns]
    if not named and prompts and not columns.keys().isdisjoint(_ANSWERS):
        named = list(prompts)
    return first_key(row, named) or first_key(row, candidates)


def _refuse(row: Mapping[str, Any], where: str, read: Collection[str] = ()) -> None:
    """Refuse a row that needs something unsupported. The caller supports the keys in `read`."""
    for key in present(row, _NOT_SUPPORTED.keys() - set(read)):
        raise DataError(f"{where}: key {key} is not supported: {_NOT_SUPPORTED[key]}")
    if isinstance(row.get("label"), bool) and "label" not in read and row.keys() & {"completion", "messages"}:
        raise DataError(f"{where}: key label is not supported: {_NOT_SUPPORTED['kto_tag']}")


def _refuse_misspelled(row: Mapping[str, Any], where: str) -> None:
    """Refuse a misspelled optional key, because its value would not be trained."""
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


def _from_prompt(row: Mapping[str, Any], key: str, where: str, data: DataConfig) -> list[Turn]:
    """Return the turns of a row with a prompt and an answer; each is a text or a list of messages."""
    answer_key = first_key(row, _ANSWERS)
    assert answer_key is not None, "_format_key asks for both"
    prompt = _prompt_turns(row, key, where, data)
    if isinstance(row[answer_key], list):
        return [*prompt, *read_turns(row[answer_key], answer_key, where, data)]
    return [*prompt, _assistant(text_of(row, answer_key, where))]


def _prompt_turns(row: Mapping[str, Any], key: str, where: str, data: DataConfig) -> list[Turn]:
    """Return the turns of a row up to its question, which is a text or a list of messages."""
    has_input = not is_absent(row.get("input")) and text_of(row, "input", where).strip()
    if isinstance(row[key], list) and not has_input:
        prompt = [turn._replace(learned=False) for turn in read_turns(row[key], key, where, data)]
    else:
        parts = [text_of(row, key, where), row["input"] if has_input else ""]
        prompt = [_user(_JOINS[data.alpaca_input_join].join(part for part in parts if part))]
    return [*_history(row, where), *prompt]


def _history(row: Mapping[str, Any], where: str) -> list[Turn]:
    """Return earlier turns: pairs of a question and its answer, which is trained too."""
    history = parse_json_text(row.get("history"))
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
    """Return the system message beside the turns, unless the turns begin with the same message."""
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
    turns = [*_system(row, turns, where), *turns]
    opening = next((turn.message["role"] for turn in turns if turn.message["role"] != "system"), None)
    if opening != "user":
        found = f"the first message is from the {opening}" if opening else "the conversation has no message"
        raise DataError(f"{where}: {found}, expected the user; drop it, or write the row as `text`")
    tools = _tools(row, turns, where)
    # A system message of tools alone has no words.
    turns = [
        turn
        for turn in turns
        if not (turn.tools and turn.message["role"] == "system" and not turn.message["content"].strip())
    ]
    return Conversation([turn.message for turn in turns], tools, tuple(turn.learned for turn in turns), where)


def _tools(row: Mapping[str, Any], turns: list[Turn], where: str) -> list[dict[str, Any]] | None:
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
