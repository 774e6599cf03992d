"""The encoder of spans against the tokenizers themselves."""

import pickle
import random

import pytest
from llama3_tokenizer import tiny_tokenizer
from tokenizer_zoo import NOT_SPECIAL, PIECES, ZOO, sentencepiece_tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from patch.data.rendering.encoder import SpanEncoder
from patch.data.rendering.spans import MARK, Span, SpecialTokenMarker, unmarked
from patch.data.tokenizer import load_tokenizer, special_tokens
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
    pieces = PIECES + 4 * special_tokens(tokenizer)
    for _ in range(300):
        text = random_text(pick, pieces)
        assert encoded(encoder, text) == plain(tokenizer, text), text


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
def test_special_tokens_of_template_and_message_side_by_side(name: str) -> None:
    """The template's are found, and the text between two of them is that of the message alone."""
    tokenizer = ZOO[name]()
    token = tokenizer.eos_token
    marker, encoder, pick = (
        SpecialTokenMarker(special_tokens(tokenizer)),
        SpanEncoder(tokenizer),
        random.Random(1),
    )
    for _ in range(50):
        said = "x" + random_text(pick, ["hello", " two", "\n", token, *special_tokens(tokenizer)]) + "x"
        got = encoded(encoder, f"{token}{marker.marked(said)}{token}")
        assert got[0] == got[-1] == tokenizer.eos_token_id
        assert tokenizer.eos_token_id not in got[1:-1]
        assert tokenizer.decode(got[1:-1]).strip() == said.strip() or name == "unigram"


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


@pytest.mark.parametrize("name", ZOO)
def test_allowed_special_tokens_are_tokens(name: str) -> None:
    tokenizer = ZOO[name]()
    text = f"say {tokenizer.eos_token} twice"
    assert encoded(SpanEncoder(tokenizer, allow_special_tokens=True), text) == plain(tokenizer, text)


def test_special_token_that_is_a_character_loses_no_text() -> None:
    """As where somebody made an ordinary token the pad token."""
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = "Q"
    marked = SpecialTokenMarker(special_tokens(tokenizer)).marked("a Q <|eot_id|> QQ")
    assert tokenizer.decode(encoded(SpanEncoder(tokenizer), marked)) == "a Q <|eot_id|> QQ"


def test_text_that_begins_anew_has_the_prefix_of_a_beginning() -> None:
    for kind in ("legacy", "first", "always"):
        tokenizer = sentencepiece_tokenizer(kind)
        ((bos, text),) = SpanEncoder(tokenizer).encode([[Span("<s>", False), Span("hello", True, True)]])
        assert bos == [tokenizer.bos_token_id] and text == plain(tokenizer, "hello")


def test_token_that_merges_would_make_out_of_text_is_not_made() -> None:
    """As in vocabularies converted from sentencepiece, where <s> can be the merge of two pieces."""
    import json

    from tokenizers import Tokenizer

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
    tokenizer = load_tokenizer(str(llama3_folder))
    encoder, pick = SpanEncoder(tokenizer), random.Random(3)
    marker = SpecialTokenMarker(special_tokens(tokenizer))
    for _ in range(200):
        text = random_text(pick, PIECES + ["<|eot_id|>", "<|start_header_id|>"] * 4)
        assert encoded(encoder, text) == plain(tokenizer, text)
        got = encoded(encoder, marker.marked(text))
        assert tokenizer.decode(got) == text and max(got, default=0) < 128000


def test_encoder_can_be_sent_to_another_process() -> None:
    encoder = SpanEncoder(tiny_tokenizer())
    samples = [[Span("<|eot_id|>hello", False), Span(" world", True)], [], [Span("", False)]]
    assert pickle.loads(pickle.dumps(encoder)).encode(samples) == encoder.encode(samples)
    assert encoder.encode([]) == [] and encoder.encode(samples)[1:] == [[], [[]]]


def test_tokenizer_without_a_fast_core_is_refused() -> None:
    class Slow(PreTrainedTokenizerBase):
        pass

    with pytest.raises(DataError, match="is a Slow, which is not a fast tokenizer; expected"):
        SpanEncoder(Slow())
