"""The encoder of spans against the tokenizers themselves; which of them tiktoken may stand in for."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import tiktoken
from llama3_tokenizer import tiny_tokenizer
from tokenizer_zoo import NOT_SPECIAL, PIECES, ZOO, sentencepiece_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from patch.data.rendering import encoder as encoders
from patch.data.rendering.byte_level import ByteLevelEncoder, byte_level_encoder
from patch.data.rendering.encoder import SpanEncoder
from patch.data.rendering.spans import MARK, Span, SpecialTokenMarker, unmarked
from patch.data.tokenizer import load_tokenizer, special_tokens
from patch.errors import DataError
from toolkits.quickstart.seed_model import LLAMA3_PATTERN

CODE_POINTS = [chr(code) for code in (*range(0xD800), *range(0xE000, 0x34000), *range(0xE0000, 0xE0200))]
"""All that Unicode has given a meaning, and the rest of their blocks."""
ODD = [
    " " * 9, "\n \n", "\t\r\n", "'S", "'\u017f", "''", "1234567", "\u0663\u0664", "\u3000", "\u00a0",
    "^" * 150, "\U0001f1e9\U0001f1ea", "e\u0301", "\u212b", "\uac00\u11a8", "\U0001e4d0", "\u0378", "ab" * 70,
]  # fmt: skip
"""Runs, contractions, digits of other scripts, what NFC changes, a new letter, an unknown one."""



def plain(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def encoded(encoder: SpanEncoder, *texts: str) -> list[int]:
    (sample,) = encoder.encode([[Span(text, False) for text in texts]])
    assert len(sample) == len(texts)
    return sum(sample, [])


def converted(tokenizer: PreTrainedTokenizerBase) -> ByteLevelEncoder | None:
    backend = tokenizer.backend_tokenizer
    return byte_level_encoder(backend, json.loads(backend.to_str()), ())


def random_text(pick: random.Random, pieces: list[str]) -> str:
    return "".join(pick.choices(pieces, k=pick.randint(0, 12)))


def odd_text(pick: random.Random) -> str:
    return "".join(pick.choice(pick.choice((PIECES, ODD, CODE_POINTS))) for _ in range(pick.randint(0, 12)))


@pytest.mark.parametrize("name", ZOO)
def test_ids_are_those_of_the_tokenizer_where_the_template_writes_the_special_tokens(name: str) -> None:
    """By tiktoken where the tokenizer is of a known form: then any text, not only pieces of some scripts."""
    tokenizer = ZOO[name]()
    encoder, pick = SpanEncoder(tokenizer), random.Random(name)
    is_byte_level = name in ("llama3", "qwen3")
    assert (converted(tokenizer) is not None) == is_byte_level
    texts = [random_text(pick, PIECES + 4 * special_tokens(tokenizer)) for _ in range(300)]
    for text in [*texts, *(odd_text(pick) for _ in range(2000 if is_byte_level else 0))]:
        assert encoded(encoder, text) == plain(tokenizer, text), ascii(text)


@pytest.mark.parametrize("name", ZOO)
def test_special_tokens_of_a_message_are_text(name: str) -> None:
    """As transformers encodes a text with `split_special_tokens`."""
    tokenizer = ZOO[name]()
    special = special_tokens(tokenizer)
    marker, encoder, pick = SpecialTokenMarker(special), SpanEncoder(tokenizer), random.Random(name)
    ids = set(tokenizer.convert_tokens_to_ids(special)) - {tokenizer.unk_token_id}
    without_added = [piece for piece in PIECES if piece not in NOT_SPECIAL]
    for _ in range(300):
        text = random_text(pick, without_added + 2 * special)
        marked = marker.marked(text)
        assert unmarked(marked) == text and marker.is_in(text) == any(token in text for token in special)
        got = encoded(encoder, marked)
        expected = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert not ids.intersection(got), text
        assert got == expected or name == "unigram", text  # which makes special tokens of text even so
        if name in ("llama3", "qwen", "qwen3"):
            normalizer = tokenizer.backend_tokenizer.normalizer
            assert tokenizer.decode(got) == (normalizer.normalize_str(text) if normalizer else text)


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("border", [" answer", "</s>\nnext", "<|im_end|>\n", "<|end|>\nnext"])
def test_spans_continue_a_text_without_a_new_beginning(name: str, border: str) -> None:
    """Cut where no merge crosses, they have the ids of the whole."""
    tokenizer = ZOO[name]()
    encoder = SpanEncoder(tokenizer)
    for before in ("<s>[INST] question [/INST]", "hello", tokenizer.eos_token, ""):
        for after in ("", "</s>", " x", tokenizer.eos_token + "hello"):
            whole = plain(tokenizer, before + border + after)
            assert encoded(encoder, before, border, after) == whole, (before, border, after)


def test_token_is_found_after_a_mark_at_the_end_of_a_text() -> None:
    """A message that ends like the beginning of a special token; the template goes on like its rest."""
    tokenizer = tiny_tokenizer()
    marker, encoder = SpecialTokenMarker(special_tokens(tokenizer)), SpanEncoder(tokenizer)
    got = encoded(encoder, marker.marked("say <|eot_") + "id|><|eot_id|>")
    assert got.count(tokenizer.convert_tokens_to_ids("<|eot_id|>")) == 1 == got[-1:].count(got[-1])
    assert marker.marked("hello") == "hello" and marker.marked("a <") == f"a <{MARK}"


def test_tools_and_arguments_are_marked_in_depth() -> None:
    marker = SpecialTokenMarker(["<s>", "<|x|>"])
    data = {"a": ["<s>", {"k<s>": ("<|x|>", 1, None, True)}]}
    marked = marker.marked(data)
    assert marker.is_in(data) and not marker.is_in(marked)
    assert not marker.is_in({"a": [1, "<", {"b": None}]})
    (inner,) = marked["a"][1].items()
    assert (
        unmarked(inner[0]) == "k<s>" and unmarked(inner[1][0]) == "<|x|>" and inner[1][1:] == [1, None, True]
    )


def test_special_token_that_is_a_character_loses_no_text() -> None:
    """As where somebody made an ordinary token the pad token."""
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = "Q"
    marked = SpecialTokenMarker(special_tokens(tokenizer)).marked("a Q <|eot_id|> QQ")
    assert tokenizer.decode(encoded(SpanEncoder(tokenizer), marked)) == "a Q <|eot_id|> QQ"


def test_token_that_merges_would_make_out_of_text_is_not_made() -> None:
    """As in vocabularies converted from sentencepiece, where <s> can be the merge of two pieces."""
    named = tiny_tokenizer()
    assert len(plain(named, "hello")) == 1
    named.add_special_tokens({"pad_token": AddedToken("hello", special=True, normalized=False)})
    text = encoded(SpanEncoder(named), SpecialTokenMarker(special_tokens(named)).marked("hello"))
    assert named.pad_token_id not in text and named.decode(text) == "hello"
    described = json.loads(sentencepiece_tokenizer("legacy").backend_tokenizer.to_str())
    model, next_id = described["model"], 1000
    for piece in ("<", "s", ">"):
        if piece not in model["vocab"]:
            model["vocab"][piece], next_id = next_id, next_id + 1
    model["vocab"]["s>"] = next_id
    model["merges"] = [["s", ">"], ["<", "s>"], *model["merges"]]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(described)), bos_token="<s>", eos_token="</s>"
    )
    marked = SpecialTokenMarker(special_tokens(tokenizer)).marked("<s>")
    split = tokenizer("<s>", add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert tokenizer.bos_token_id in split  # so transformers' own way is not enough here
    got = encoded(SpanEncoder(tokenizer), marked)
    assert tokenizer.bos_token_id not in got and tokenizer.decode(got).strip() == "<s>"


def test_real_llama3_tokenizer(llama3_folder) -> None:
    """Tokens side by side, among them those that merging cannot make."""
    tokenizer, pick = load_tokenizer(str(llama3_folder)), random.Random(3)
    encoder = SpanEncoder(tokenizer)
    tokens = tokenizer.backend_tokenizer.decode_batch([[id_] for id_ in range(128_000)])
    texts = [random_text(pick, PIECES + ["<|eot_id|>", "<|start_header_id|>"] * 4) for _ in range(200)]
    marker = SpecialTokenMarker(special_tokens(tokenizer))
    for text in texts:
        got = encoded(encoder, marker.marked(text))
        assert tokenizer.decode(got) == text and max(got, default=0) < 128000
    texts += ["".join(pick.choices(tokens, k=pick.randint(1, 5))) for _ in range(8000)]
    texts += [token.strip() + tail for token in tokens[::40] for tail in ("", "s", " " * 40)]
    texts += [odd_text(pick) for _ in range(1500)]
    expected = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    for text, encoding in zip(texts, expected, strict=True):
        assert encoded(encoder, text) == encoding.ids, ascii(text)


def test_tokenizer_without_a_fast_core_is_refused() -> None:
    class Slow(PreTrainedTokenizerBase):
        pass

    with pytest.raises(DataError, match="is a Slow, which is not a fast tokenizer; expected"):
        SpanEncoder(Slow())


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_marked_texts_have_the_same_ids_by_tiktoken_and_by_a_copy_of_the_tokenizer(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Special tokens of template and row, their beginnings and ends, beside other added tokens."""
    tokenizer, pick = ZOO[name](), random.Random(name)
    special = special_tokens(tokenizer)
    by_tiktoken = SpanEncoder(tokenizer)
    monkeypatch.setattr(encoders, "byte_level_encoder", lambda *_: None)
    by_copy, marker = SpanEncoder(tokenizer), SpecialTokenMarker(special)
    pieces = [*special, *NOT_SPECIAL, "<", "<thi", "nk>", "think>", "<|", "|>", "hello", " "]
    for _ in range(2000):
        texts = ["".join(pick.choices(pieces, k=pick.randint(0, 5))) for _ in range(4)]
        text = "".join(marker.marked(part) if pick.random() < 0.6 else part for part in texts)
        assert encoded(by_tiktoken, text) == encoded(by_copy, text), ascii(text)


@pytest.mark.parametrize("kind", [r"\p{L}", r"\p{N}", r"\s|(?i:[strevmld'])"])
def test_both_libraries_know_the_same_characters(kind: str) -> None:
    """All code points, for each class of the patterns; it fails if one alone gets a new Unicode."""
    text = "".join(CODE_POINTS)
    one_byte = {bytes([byte]): byte for byte in range(256)}
    finder = tiktoken.Encoding("finder", pat_str=kind, mergeable_ranks=one_byte, special_tokens={})
    found = set(bytes(finder.encode_ordinary(text)).decode())
    left = pre_tokenizers.Split(Regex(kind), "removed").pre_tokenize_str(text)
    assert found == set(CODE_POINTS).difference(*(piece for piece, _ in left))


def byte_level(
    vocab: dict[str, int],
    merges: list[tuple[str, str]],
    ignore_merges: bool = False,
) -> PreTrainedTokenizerFast:
    """A tokenizer of the 256 bytes and further tokens; the ids of the bytes follow those of the others."""
    first = max(vocab.values()) + 1
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(
        models.BPE(
            vocab | {character: first + index for index, character in enumerate(alphabet)},
            merges,
            ignore_merges=ignore_merges,
        )
    )
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def test_random_vocabularies_have_the_ids_of_the_tokenizer_if_they_are_converted() -> None:
    """Two letters, merges of any parts in any order, several for a token: what the proof is about."""
    pick, counts = random.Random(2), {True: 0, False: 0}
    for _ in range(250):
        tokens, merges = ["a", "b"], []
        for _ in range(pick.randint(1, 10)):
            pair = (pick.choice(tokens), pick.choice(tokens))
            if pair not in merges and len(pair[0] + pair[1]) < 9:
                merges.append(pair)
                tokens += [token for token in ["".join(pair)] if token not in tokens]
        if pick.random() < 0.5:
            every = [(t[:size], t[size:]) for t in tokens for size in range(1, len(t))]
            merges = [pair for pair in every if pair[0] in tokens and pair[1] in tokens]
        ids = [token for token in tokens if len(token) > 1] + ["aab"] * (pick.random() < 0.2)
        vocab = {token: id_ for id_, token in enumerate(dict.fromkeys(ids))}
        if pick.random() < 0.3:
            pick.shuffle(merges)
        tokenizer = byte_level(vocab, merges, ignore_merges=pick.random() < 0.5)
        encoder = converted(tokenizer)
        counts[encoder is not None] += 1
        for _ in range(40 if encoder else 0):
            text = "".join(pick.choices("ab", k=pick.randint(1, 24)))
            assert encoder.ids(text) == plain(tokenizer, text), (text, vocab, merges)
    assert min(counts.values()) > 50, counts


def change_model(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda described: described["model"].update(changes)


def change_pre_tokenizer(index: int, **changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda described: described["pre_tokenizer"]["pretokenizers"][index].update(changes)


@pytest.mark.parametrize(
    "change",
    [
        change_model(dropout=0.1),
        change_pre_tokenizer(0, invert=True),
        change_pre_tokenizer(0, behavior="Removed"),
        change_pre_tokenizer(0, pattern={"Regex": r"\w+|\W"}),
        change_pre_tokenizer(1, add_prefix_space=True),
        change_pre_tokenizer(1, use_regex=True),
        lambda described: described["model"]["vocab"].pop("\u0100"),
        lambda described: described.update(pre_tokenizer=None),
        lambda described: described.update(normalizer={"type": "Lowercase"}),
        lambda described: described["added_tokens"][0].update(lstrip=True),
        lambda described: described["added_tokens"][0].update(rstrip=True),
        lambda described: described["added_tokens"][0].update(single_word=True),
        lambda described: described["added_tokens"][0].update(normalized=True),
    ],
)
def test_other_forms_are_left_to_the_tokenizer(change: Callable[[dict[str, Any]], None]) -> None:
    described = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    change(described)
    backend = Tokenizer.from_str(json.dumps(described))
    assert byte_level_encoder(backend, json.loads(backend.to_str()), ()) is None


def test_long_texts_have_the_ids_of_the_tokenizer() -> None:
    """Longer than what tiktoken gets; a million blanks would end the process there."""
    tokenizer = ZOO["llama3"]()
    encoder, words = SpanEncoder(tokenizer), "hello world\n" * 25_000
    assert encoded(encoder, words) == plain(tokenizer, words)
    (blank,) = set(plain(tokenizer, " " * 9))
    assert encoded(encoder, " " * 1_050_000 + "x") == [blank] * 1_049_999 + plain(tokenizer, " x")


def test_lone_surrogate_is_refused() -> None:
    with pytest.raises(UnicodeError):
        encoded(SpanEncoder(tiny_tokenizer()), "hello \udc00")
