"""Samples of raw JSON against hand-written ids, and against transformers' own assistant masks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from llama3_tokenizer import GPT2_PATTERN, LLAMA3_PATTERN, tiny_tokenizer
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from patch.data.chat_templates import LLAMA3_CHAT_TEMPLATE
from patch.data.formats.keys import columns_in
from patch.data.formats.turns import PLAIN
from patch.data.sft.source import load_sft
from patch.errors import DataError

# The built-in template for LLaMA 3 as the second implementation, written for transformers' masks alone.
MARKED = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim + '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
)


def write_rows(folder: Path, rows: list) -> Path:
    path = folder / "rows.json"
    path.write_text(json.dumps(rows))
    return path


def alpaca(prompt: str, answer: str) -> dict[str, str]:
    return {"instruction": prompt, "output": answer}


def learned_text(sample, tokenizer) -> str:
    return tokenizer.decode(sample.labels[sample.loss_mask.bool()])


def test_sample_is_exactly_what_was_written_by_hand(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    source = load_sft(write_rows(tmp_path, [alpaca("hello", "world")]), tokenizer, 16)
    names = ["<|begin_of_text|>", "<|start_header_id|>", "user", "<|end_header_id|>", "\u010a\u010a", "hello"]
    names += ["<|eot_id|>", "<|start_header_id|>", "assistant", "<|end_header_id|>", "\u010a\u010a", "world"]
    names += ["<|eot_id|>"]
    ids = tokenizer.convert_tokens_to_ids(names)
    assert None not in ids
    end = tokenizer.eos_token_id
    (sample,) = (source[index] for index in range(len(source)))
    assert sample.tokens.tolist() == ids[:-1] + [end] * 4
    assert sample.labels.tolist() == ids[1:] + [end] * 4
    # labels[9] is the header's line break, labels[10] the answer, labels[11] its end of turn.
    assert sample.loss_mask.tolist() == [0.0] * 10 + [1.0, 1.0] + [0.0] * 4
    assert (sample.tokens.dtype, sample.loss_mask.dtype) == (torch.int64, torch.float32)


@pytest.mark.parametrize("pad", ["<|eot_id|>", "Q"])
def test_end_of_turn_is_learned_whatever_the_pad_token(tmp_path: Path, pad: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = pad
    source = load_sft(write_rows(tmp_path, [alpaca("Q", "yes Q"), alpaca("Q", "no")]), tokenizer, 40)
    assert [learned_text(source[index], tokenizer) for index in (0, 1)] == ["yes Q<|eot_id|>", "no<|eot_id|>"]
    assert source[1].tokens[-1] == tokenizer.convert_tokens_to_ids(pad)


@pytest.mark.parametrize(("pattern", "is_trap"), [(LLAMA3_PATTERN, False), (GPT2_PATTERN, True)])
def test_prompt_is_encoded_as_generation_does(tmp_path: Path, pattern: str, is_trap: bool) -> None:
    """With GPT-2's split pattern, encoding prompt and answer as one text merges over the border."""
    tokenizer = tiny_tokenizer(pattern, LLAMA3_CHAT_TEMPLATE)
    answers = ["42", "four", "(x)", "\u4f60\u597d", "a\n\nb", "'s"]
    source = load_sft(write_rows(tmp_path, [alpaca("2+2?", answer) for answer in answers]), tokenizer, 40)
    asked = [{"role": "user", "content": "2+2?"}]
    given = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
    trapped = False
    for index, answer in enumerate(answers):
        assert source[index].tokens[: len(given)].tolist() == given
        assert source[index].loss_mask[: len(given)].tolist() == [0.0] * (len(given) - 1) + [1.0]
        assert learned_text(source[index], tokenizer) == f"{answer}<|eot_id|>"
        told = [*asked, {"role": "assistant", "content": answer}]
        as_one = tokenizer.apply_chat_template(told, return_dict=True)["input_ids"]
        trapped = trapped or as_one[: len(given)] != given
    assert trapped == is_trap


def test_text_that_the_tokenizer_fails_on_is_refused_with_the_file(tmp_path: Path) -> None:
    core = Tokenizer(models.WordLevel({"<|eot_id|>": 0, "hello": 1}, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|eot_id|>")
    tokenizer.chat_template = LLAMA3_CHAT_TEMPLATE
    path = write_rows(tmp_path, [alpaca("hello", "world")])
    with pytest.raises(DataError, match=f"^{path}: row 1: tokenizer .* cannot encode it: WordLevel error"):
        load_sft(path, tokenizer, 64)


def test_masks_equal_transformers_on_several_turns(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    rows = []
    for turns in range(1, 6):
        messages = [{"role": "system", "content": "answer question \u4e16\u754c"}] if turns % 2 else []
        for turn in range(turns):
            messages.append({"role": "user", "content": f"what is {turn}?"})
            messages.append({"role": "assistant", "content": f"{turn} \u00e9\u4f60\u597d fox\n\nthe dog"})
        rows.append({"messages": messages})
    for row, sample in zip(rows, load_sft(write_rows(tmp_path, rows), tokenizer, 150), strict=True):
        marked = tokenizer.apply_chat_template(
            row["messages"], chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = marked["input_ids"], marked["assistant_masks"]
        count = min(len(ids) - 1, 150)
        assert sample.tokens[:count].tolist() == ids[:count]
        assert sample.labels[:count].tolist() == ids[1 : count + 1]
        assert sample.loss_mask[:count].tolist() == mask[1 : count + 1]
        assert not sample.loss_mask[count:].any()


def test_columns_that_no_row_has_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{**alpaca("hello", "world"), "topic": "x"}, {"messages": [{"role": "user", "content": "hello"}]}]
    columns = {"output": "answre", "system": "topic", "content": "text", "role": "role"}
    data = replace(PLAIN, columns="output=answre", max_dropped_share=1.0)
    path = write_rows(tmp_path, rows)
    said = "no row has the key answre of --columns output=answre; rows were read by their usual keys"
    for _ in ("tokenized", "from the cache"):
        caplog.clear()
        load_sft(path, tiny_tokenizer(), 16, data, cache_dir=tmp_path / "cache")
        assert [line for line in caplog.messages if "no row has" in line] == [f"{path}: {said}"]
    assert columns_in(rows[0], columns) == {"system"}
    assert columns_in(rows[1], columns) == {"role"}
    assert columns_in({"messages": json.dumps([{"text": "hello"}])}, columns) == {"content"}
