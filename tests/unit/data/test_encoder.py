"""The encoder of spans against the tokenizers themselves."""

import json
import random

import pytest
from llama3_tokenizer import tiny_tokenizer
from tokenizer_zoo import NOT_SPECIAL, PIECES, ZOO, sentencepiece_tokenizer
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from patch.data.rendering.spans import MARK, Span, SpanEncoder, SpecialTokenMarker, unmarked
from patch.data.tokenizer import special_tokens
from patch.errors import DataError


def plain(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def encoded(encoder: SpanEncoder, *texts: str) -> list[int]:
    (sample,) = encoder.encode([[Span(text, False) for text in texts]])
    assert len(sample) == len(texts)
    return sum(sample, [])


def random_text(pick: random.Random, pieces: list[str]) -> str:
    return "".join(pick.choices(pieces, k=pick.randint(0, 12)))


@pytest.mark.parametrize("name", ZOO)
def test_ids_are_those_of_the_tokenizer_where_the_template_writes_the_special_tokens(name: str) -> None:
    tokenizer = ZOO[name]()
    encoder, pick = SpanEncoder(tokenizer), random.Random(name)
    texts = [random_text(pick, PIECES + 4 * special_tokens(tokenizer)) for _ in range(300)]
    for text in texts:
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
    """An ordinary token was made the pad token."""
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


def test_tokenizer_without_a_fast_core_is_refused() -> None:
    class Slow(PreTrainedTokenizerBase):
        pass

    with pytest.raises(DataError, match="is a Slow, which is not a fast tokenizer; expected"):
        SpanEncoder(Slow())


def test_lone_surrogate_is_refused() -> None:
    with pytest.raises(TypeError):
        encoded(SpanEncoder(tiny_tokenizer()), "hello \udc00")
