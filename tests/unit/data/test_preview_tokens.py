"""Tokens as text: whole characters, nothing acts on a terminal, learning is seen without colours."""

import io

import numpy as np
import pytest
from llama3_tokenizer import tiny_tokenizer
from rich.console import Console
from rich.text import Text
from tokenizer_zoo import ZOO

from patch.data.preview.tokens import ShownRow, ShownToken, TokenTexts, print_row, terminal, visible

TEXTS = (
    "the quick brown fox\n\n  jumps",
    "\u4f60\u597d \u4e16\u754c, \U0001f99c \U0001f468\u200d\U0001f469",  # Chinese, emoji, a joined emoji
    "\u0645\u0631\u062d\u0628\u0627 e\u0301 \u0928\u092e\u0938\u094d\u0924\u0947",  # Arabic, an accent, Hindi
)


def shown(tokenizer, ids: list[int], is_learned: bool = False) -> list[ShownToken]:
    return TokenTexts(tokenizer).shown(np.array(ids), np.full(len(ids), is_learned))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", [name for name in ZOO if name != "unigram"])
def test_pieces_together_are_what_the_tokenizer_decodes(name, text):
    tokenizer = ZOO[name]()
    ids = tokenizer(text)["input_ids"]
    pieces = shown(tokenizer, ids)
    assert [piece.id for piece in pieces] == ids
    text = "".join(piece.text for piece in pieces if not piece.is_special)
    # SentencePiece's decoder removes the first space, which is a token like any other.
    assert text.lstrip() == tokenizer.decode(ids, skip_special_tokens=True)


def test_a_character_is_shown_at_the_token_in_which_it_begins_and_half_of_one_as_bytes():
    tokenizer = tiny_tokenizer()
    ids = tokenizer("a\u4f60b", add_special_tokens=False)["input_ids"]
    assert [(piece.text, piece.continues) for piece in shown(tokenizer, ids)] == [
        ("a", False), ("\u4f60", False), ("", True), ("", True), ("b", False),
    ]  # fmt: skip
    cut = shown(tokenizer, [*ids[1:3], ids[-1]])
    assert [visible(piece.text) for piece in cut] == ["<0xE4>", "<0xBD>", "b"]
    assert not any(piece.continues for piece in cut)


def test_unknown_tokens_are_shown_as_such_and_not_all_added_ones_are_special():
    tokenizer = ZOO["unigram"]()
    ids = tokenizer("he \U0001f99c", add_special_tokens=False)["input_ids"]
    assert [token.text for token in shown(tokenizer, [*ids, 10**6])][-2:] == ["<unk>", "<no token 1000000>"]
    tokenizer = ZOO["qwen"]()
    ids = tokenizer("<|im_start|><think>x", add_special_tokens=False)["input_ids"]
    assert [token.is_special for token in shown(tokenizer, ids)] == [True, False, False]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b\n\t", "a\u2423b\u21b5\u21e5"),
        ("\x1b[31m\x07\r\x7f", "\u241b[31m\u2407\u240d\u2421"),
        ("\x9b2J", "<U+009B>2J"),  # one character that begins an escape sequence
        ("\u202eevil\u200d\ufeff\u00a0\u3000", "<U+202E>evil<U+200D><U+FEFF><U+00A0><U+3000>"),
        ("\u0301e\u0301", "\u25cc\u0301e\u0301"),
        ("\u2502\u2423", "<U+2502><U+2423>"),  # the data has signs of ours
        ("\udce4\ud800", "<0xE4><U+D800>"),
    ],
)
def test_every_character_is_visible(text, expected):
    assert visible(text) == expected


def test_no_character_of_unicode_acts_on_a_terminal():
    everything = "".join(map(chr, range(0x110000)))
    assert visible(everything).isprintable() and " " not in visible(everything)


def _row(*spans: tuple[str, bool], **more) -> ShownRow:
    tokenizer = tiny_tokenizer()
    tokens = [
        token
        for text, is_learned in spans
        for token in shown(tokenizer, tokenizer(text, add_special_tokens=False)["input_ids"], is_learned)
    ]
    return ShownRow(**{"where": "rows.jsonl: line 7", "samples": [tokens], "remarks": []} | more)


def _printed(row: ShownRow, *, max_lines: int | None = None, **console) -> str:
    stream = io.StringIO()
    options = {"width": 60, "soft_wrap": True, "highlight": False, "markup": False} | console
    print_row(Console(file=stream, **options), row, max_lines)
    return stream.getvalue()


CHAT = (
    ("<|start_header_id|>user<|end_header_id|>\n\nwhat is\n2? [b]\U0001f99c<|eot_id|>", False),
    ("four.<|eot_id|>", True),
)
PLAIN = """\
rows.jsonl: line 7: 22 tokens, 4 learned (18.2%)
        \u2503 \u27e6<|start_header_id|>\u27e7\u2502user\u2502\u27e6<|end_header_id|>\u27e7\u2502\u21b5\u21b5
        \u2503 what\u2502\u2423is\u2502\u21b5
        \u2503 2\u2502?\u2502\u2423\u2502[\u2502b\u2502]\u2502\U0001f99c\u2506\u2506\u2506\u2502\
\u27e6<|eot_id|>\u27e7
learned \u2503 fo\u2502ur\u2502.\u2502\u27e6<|eot_id|>\u27e7
"""


def test_text_on_a_terminal_says_without_colours_what_it_says_with_them():
    assert _printed(_row(*CHAT)) == PLAIN
    coloured = _printed(_row(*CHAT), force_terminal=True, color_system="truecolor")
    assert "\x1b[" in coloured and Text.from_ansi(coloured).plain.rstrip("\n") == PLAIN.rstrip("\n")
    grounds = [
        {span.style.bgcolor for span in Text.from_ansi(line).spans if span.style.bgcolor}
        for line in coloured.splitlines()
    ]
    assert [bool(ground) for ground in grounds] == [False, False, False, False, True]


def test_long_lines_wrap_between_tokens_and_keep_the_margin():
    lines = _printed(_row(("the quick " * 20, True)), width=40).splitlines()[1:]
    assert len(lines) > 5
    assert all(line.startswith("learned \u2503 ") and len(line) <= 40 for line in lines)
    joined = "\u2502".join(line.removeprefix("learned \u2503 ") for line in lines)
    assert joined.replace("\u2502", "").replace("\u2423", " ") == "the quick " * 20


def test_right_to_left_text_does_not_exchange_tokens():
    (line,) = _printed(_row(("\u0645", True))).splitlines()[1:]
    assert line == "learned \u2503 \u200e\u0645\u200e\u2506"


def test_only_so_many_lines_are_printed():
    lines = _printed(_row(("a\n" * 10, False)), max_lines=3).splitlines()
    assert len(lines) == 5 and lines[-1] == "        \u2503 ... 7 more lines"


def test_a_stream_without_our_signs_gets_escapes():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_row(terminal(stream), _row(("four", True)))
    stream.flush()
    assert b"learned \\u2503 fo\\u2502ur" in stream.buffer.getvalue()
