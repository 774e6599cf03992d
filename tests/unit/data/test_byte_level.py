"""tiktoken in place of tokenizers: the same ids, and which tokenizers are left to tokenizers."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import tiktoken
from llama3_tokenizer import tiny_tokenizer
from tokenizer_zoo import NOT_SPECIAL, PIECES, ZOO
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from patch.data.rendering.byte_level import ByteLevelEncoder, byte_level_encoder
from patch.data.rendering.encoder import RenamingEncoder, SpanEncoder
from patch.data.rendering.spans import Span, SpecialTokenMarker
from patch.data.tokenizer import load_tokenizer, special_tokens
from toolkits.quickstart.seed_model import LLAMA3_PATTERN

CODE_POINTS = [chr(code) for code in (*range(0xD800), *range(0xE000, 0x34000), *range(0xE0000, 0xE0200))]
"""All that Unicode has given a meaning, and the rest of their blocks."""
ODD = [
    " " * 9, "\n \n", "\t\r\n", "'S", "'\u017f", "''", "1234567", "\u0663\u0664", "\u3000", "\u00a0",
    "^" * 150, "\U0001f1e9\U0001f1ea", "e\u0301", "\u212b", "\uac00\u11a8", "\U0001e4d0", "\u0378", "ab" * 70,
]  # fmt: skip
"""Runs, contractions, digits of other scripts, what NFC changes, a new letter, an unknown one."""


def converted(tokenizer: PreTrainedTokenizerBase, special: tuple[str, ...] = ()) -> ByteLevelEncoder | None:
    backend = tokenizer.backend_tokenizer
    return byte_level_encoder(backend, json.loads(backend.to_str()), special)


def ids_of(encoder: Any, text: str) -> list[int]:
    (((*ids,),),) = encoder.encode([[Span(text, False)]])
    return ids


def plain(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def random_text(pick: random.Random) -> str:
    return "".join(pick.choice(pick.choice((PIECES, ODD, CODE_POINTS))) for _ in range(pick.randint(0, 12)))


@pytest.mark.parametrize("name", ZOO)
def test_only_tokenizers_of_known_form_are_converted(name: str) -> None:
    assert (converted(ZOO[name]()) is not None) == (name in ("llama3", "qwen3"))


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_random_texts_have_the_ids_of_the_tokenizer(name: str) -> None:
    tokenizer, pick = ZOO[name](), random.Random(name)
    encoder = converted(tokenizer)
    for _ in range(2000):
        text = random_text(pick)
        assert ids_of(encoder, text) == plain(tokenizer, text), ascii(text)


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_marked_texts_have_the_ids_of_the_renaming_encoder(name: str) -> None:
    """Special tokens of template and row, their beginnings and ends, beside other added tokens."""
    tokenizer, pick = ZOO[name](), random.Random(name)
    special = special_tokens(tokenizer)
    byte_level = converted(tokenizer, tuple(special))
    renaming = RenamingEncoder(json.loads(tokenizer.backend_tokenizer.to_str()), special)
    marker = SpecialTokenMarker(special)
    pieces = [*special, *NOT_SPECIAL, "<", "<thi", "nk>", "think>", "<|", "|>", "hello", " "]
    for _ in range(2000):
        texts = ["".join(pick.choices(pieces, k=pick.randint(0, 5))) for _ in range(4)]
        text = "".join(marker.marked(part) if pick.random() < 0.6 else part for part in texts)
        assert ids_of(byte_level, text) == ids_of(renaming, text), ascii(text)


def test_real_vocabulary_has_the_ids_of_the_tokenizer(llama3_folder) -> None:
    """Tokens side by side, among them those that merging cannot make."""
    tokenizer, pick = load_tokenizer(str(llama3_folder)), random.Random(0)
    encoder = SpanEncoder(tokenizer)
    assert isinstance(encoder._encoder, ByteLevelEncoder)
    tokens = tokenizer.backend_tokenizer.decode_batch([[id_] for id_ in range(128_000)])
    texts = ["".join(pick.choices(tokens, k=pick.randint(1, 5))) for _ in range(8000)]
    texts += [token.strip() + tail for token in tokens[::40] for tail in ("", "s", " " * 40)]
    texts += [random_text(pick) for _ in range(1500)]
    expected = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    for text, encoding in zip(texts, expected, strict=True):
        assert ids_of(encoder, text) == encoding.ids, ascii(text)


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
    pattern: str = LLAMA3_PATTERN,
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


def test_merges_in_another_order_than_the_ids_are_left_to_the_tokenizer() -> None:
    """tiktoken would make "ab" of "abc" first."""
    merges = [("b", "c"), ("a", "b")]
    assert converted(byte_level({"ab": 0, "bc": 1}, merges)) is None
    encoder = converted(byte_level({"ab": 1, "bc": 0}, merges))
    assert ids_of(encoder, "abc")[1] == 0


def test_token_that_no_merge_makes_is_found_only_as_a_whole_piece() -> None:
    """tiktoken would make "abc" of "ab" and "c" in any piece."""
    vocab, merges = {"ab": 0, "abc": 1}, [("a", "b")]
    assert converted(byte_level(vocab, merges, ignore_merges=True)) is None
    tokenizer = byte_level(vocab, merges)
    encoder = converted(tokenizer)
    for text in ("abc", "xabc", "abcd", "ab", " abc"):
        assert ids_of(encoder, text) == plain(tokenizer, text)
        assert 1 not in ids_of(encoder, text)


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
            assert ids_of(encoder, text) == plain(tokenizer, text), (text, vocab, merges)
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


def test_vocabulary_without_a_byte_is_left_to_the_tokenizer() -> None:
    described = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    del described["model"]["vocab"]["\u0100"]
    assert byte_level_encoder(Tokenizer.from_str(json.dumps(described)), described, ()) is None


def test_special_token_that_merges_make_out_of_text_is_not_made() -> None:
    tokenizer = tiny_tokenizer()
    assert len(plain(tokenizer, "hello")) == 1
    tokenizer.add_special_tokens({"pad_token": AddedToken("hello", special=True, normalized=False)})
    marked = SpecialTokenMarker(special_tokens(tokenizer)).marked("hello")
    got = ids_of(SpanEncoder(tokenizer), marked)
    assert tokenizer.pad_token_id not in got and tokenizer.decode(got) == "hello"


def test_long_texts_have_the_ids_of_the_tokenizer() -> None:
    """Longer than what tiktoken gets; a million blanks would end the process there."""
    tokenizer = ZOO["llama3"]()
    encoder = converted(tokenizer)
    words = "hello world\n" * 25_000
    assert ids_of(encoder, words) == plain(tokenizer, words)
    (blank,) = set(plain(tokenizer, " " * 9))
    assert ids_of(encoder, " " * 1_050_000 + "x") == [blank] * 1_049_999 + plain(tokenizer, " x")


def test_lone_surrogate_is_refused() -> None:
    with pytest.raises(UnicodeError):
        ids_of(SpanEncoder(tiny_tokenizer()), "hello \udc00")


def test_text_is_normalized_before_it_is_encoded() -> None:
    tokenizer = ZOO["qwen3"]()
    assert isinstance(tokenizer.backend_tokenizer.normalizer, normalizers.NFC)
    assert ids_of(converted(tokenizer), "e\u0301") == plain(tokenizer, "\u00e9")
