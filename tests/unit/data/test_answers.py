"""Rows, conversations and files of text with their samples or refusals, in whole sentences: answers.txt.

    row [columns=NAME=COLUMN,...] [join=empty] {...}    the conversation of a row; * is learned
    pair [columns=...] {...}                            the two answers of a row of preferences
    unpaired [columns=...] {...}                        the answer of a row with a label
    learn TEMPLATE [train_on=last] [allow=yes] {...}    the samples of a row; * is learned, with its tokens
    template llama|qwen "..." {...}                     the same with this template, if it is accepted
    json b'...', csv b'...'                             a file's rows, with their places

A blank is \u2581 in tokens of sentencepiece, \u0120 in byte-level ones; a line break is \u010a.
RENEW_GOLDEN=1 writes the answers anew.
"""

import ast
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from answers_on_file import check_answers
from llama3_tokenizer import tiny_tokenizer
from tokenizer_zoo import qwen_tokenizer

from patch.data.formats.rows import to_conversation, to_pair, to_unpaired
from patch.data.formats.turns import PLAIN, Conversation, Text
from patch.data.readers.rows import read_rows
from patch.data.rendering.chat import ChatRenderer
from patch.data.rendering.spans import SpanEncoder, unmarked
from patch.errors import DataError

FILE = Path(__file__).with_name("answers.txt")


def conversation_lines(found: Conversation | Text) -> list[str]:
    if isinstance(found, Text):
        prompt = [f"  prompt {json.dumps(found.prompt)}"] if found.prompt else []
        return [*prompt, f"* text {json.dumps(found.text)}"]
    lines = []
    for message, learned in zip(found.messages, found.learned, strict=True):
        more = {key: value for key, value in message.items() if key not in ("role", "content")}
        words = ["*" if learned else " ", message["role"], json.dumps(message["content"])]
        lines.append(" ".join([*words, *([json.dumps(more)] if more else [])]))
    return lines + ([f"  tools {json.dumps(found.tools)}"] if found.tools is not None else [])


def sample_lines(tokenizer: Any, found: Conversation | Text, given: dict[str, str]) -> list[str]:
    allow = "allow" in given
    data = replace(PLAIN, train_on=given.get("train_on", "all"), allow_special_tokens=allow)
    samples = ChatRenderer(tokenizer, data).render(found)
    encoded = SpanEncoder(tokenizer, allow_special_tokens=allow).encode(samples)
    lines = []
    for number, (sample, ids) in enumerate(zip(samples, encoded, strict=True), start=1):
        lines += [f"sample {number}"] if len(samples) > 1 else []
        for span, part in zip(sample, ids, strict=True):
            lines.append(f"{'*' if span.learned else ' '} {json.dumps(unmarked(span.text))}")
            lines += ["  = " + " ".join(tokenizer.convert_ids_to_tokens(part))] if span.learned else []
    return lines or ["nothing to learn"]


def template_lines(text: str) -> list[str]:
    kind, _, rest = text.partition(" ")
    template, end = json.JSONDecoder().raw_decode(rest)
    tokenizer = (tiny_tokenizer if kind == "llama" else qwen_tokenizer)(template=template)
    return sample_lines(tokenizer, to_conversation(json.loads(rest[end:]), "HERE"), {})


def row_lines(kind: str, text: str, tokenizer_of: Any) -> list[str]:
    words, brace, row = text.partition("{")
    template = words.split(" ")[0] if kind == "learn" else ""
    given = dict(word.split("=", 1) for word in words.removeprefix(template).split())
    data = replace(PLAIN, columns=given.get("columns"), alpaca_input_join=given.get("join", "newline"))
    value = json.loads(brace + row)
    if kind == "pair":
        chosen, rejected = map(conversation_lines, to_pair(value, "HERE", data))
        return ["chosen", *chosen, "rejected", *rejected]
    if kind == "unpaired":
        found, label = to_unpaired(value, "HERE", data)
        return [f"label {label}", *conversation_lines(found)]
    found = to_conversation(value, "HERE", data)
    return sample_lines(tokenizer_of(template), found, given) if template else conversation_lines(found)


def answer(line: str, folder: Path, tokenizer_of: Any) -> str:
    kind, _, text = line.partition(" ")
    try:
        if kind == "template":
            return "\n".join(template_lines(text))
        if kind in ("row", "pair", "unpaired", "learn"):
            return "\n".join(row_lines(kind, text, tokenizer_of))
        file = folder / f"rows.{kind}"
        file.write_bytes(ast.literal_eval(text))
        return "\n".join(f"{row.place}: {json.dumps(row.value)}" for row in read_rows(file))
    except DataError as error:
        field = f" ({error.field})" if error.field else ""
        return f"refused{field}: {error}".replace(str(folder), "FOLDER")


def test_every_answer_is_the_one_on_file(tmp_path: Path, tokenizer_of: Any) -> None:
    check_answers(FILE, lambda question: answer(question, tmp_path, tokenizer_of))
