"""Recognises the form of a row with a preferred and another answer: two conversations, or two texts.

    {"prompt": [messages], "chosen": [messages], "rejected": [messages]}       TRL's, with a chat template
    {"prompt": "...", "chosen": "...", "rejected": "..."}                      TRL's, plain texts without one
    {"chosen": [messages], "rejected": [messages]}     whole conversations: what both begin with is the prompt
    {"chosen": "...", "rejected": "..."}               transcripts as Anthropic's HH has them (`TURN`)
    {"messages" or "conversations": [...], "chosen": ..., "rejected": ...}     LLaMA-Factory's, and
    {"instruction": ..., "input": ..., "history": ..., "chosen": ..., "rejected": ...}    its alpaca's: an
                                                       answer is a message, a list of messages, or a text

`system` and `tools` may stand beside each but plain texts. Of both only what follows the prompt is learned.
Source: `extract_prompt` and `DPOTrainer` of TRL 1.16.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from patch.data.formats.keys import is_absent, missing_keys, quoted, rename, text_of
from patch.data.formats.rows import (
    KNOWN,
    MESSAGES,
    PROMPTS,
    conversation_of,
    of_prompt,
    refuse_others,
    split_columns,
)
from patch.data.formats.turns import PLAIN, Conversation, FormatOptions, Text, Turn, read_turns
from patch.errors import DataError

ANSWERS = ("chosen", "rejected")
TURN = "\n\nAssistant:"
"""What begins an answer in a transcript."""
_EXPECTED = (
    "chosen and rejected, beside a prompt (or messages, instruction) or with what both begin with; where the "
    "rows have other names: --columns chosen=better,rejected=worse"
)


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
    of_row, of_turns = split_columns(options.columns)
    if not set(of_row.values()).isdisjoint(row) or not row.keys() >= set(ANSWERS):
        row = rename(row, of_row, where)
    refuse_others(row, where, ANSWERS)
    if missing := [name for name in ANSWERS if name not in row]:
        found = missing_keys(row, _EXPECTED, [*KNOWN, *ANSWERS])
        raise DataError(f"{where}: --objective dpo: no key {' and no '.join(missing)}: {found}")
    key = next((name for name in (*MESSAGES, *PROMPTS) if not is_absent(row.get(name))), None)
    are_texts = [isinstance(row[name], str) for name in ANSWERS]
    if all(are_texts) and (key is None or key == "prompt" and isinstance(row[key], str)):
        return _plain_texts(row, key, where)
    if any(are_texts) and not all(are_texts):
        first, second = (quoted(row[name]) for name in ANSWERS)
        raise DataError(f"{where}: got chosen {first} and rejected {second}, expected one form")
    answers = [_turns_of(row, name, where, of_turns) for name in ANSWERS]
    is_whole = any(turns[:1] and turns[0].message["role"] != "assistant" for turns in answers)
    if key is None or is_whole and not isinstance(row.get("prompt"), list):
        size = _num_common(*answers)
        prompt, answers = answers[0][:size], [turns[size:] for turns in answers]
    elif key in MESSAGES:
        prompt = read_turns(row[key], key, where, of_turns)
    else:
        prompt = of_prompt(row, key, where, of_turns, options.alpaca_input_join)
    context = [turn._replace(learned=False) for turn in prompt]
    chosen, rejected = (conversation_of([*context, *turns], row, where) for turns in answers)
    return chosen, rejected


def _plain_texts(row: Mapping[str, Any], key: str | None, where: str) -> tuple[Text, Text]:
    """Two texts, each behind a prompt that both share: the key's, or of transcripts the common beginning."""
    chosen, rejected = (text_of(row, name, where) for name in ANSWERS)
    if key is not None:
        whole = Text(chosen, where, row[key])
        return whole, replace(whole, text=rejected)
    common = os.path.commonprefix([chosen, rejected])
    size = common.rfind(TURN) + len(TURN)
    if TURN not in common:
        raise DataError(
            f"{where}: chosen and rejected are texts without a prompt, expected the key prompt (or "
            f"instruction, messages), or two transcripts that both begin with a question and {TURN!r}"
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
