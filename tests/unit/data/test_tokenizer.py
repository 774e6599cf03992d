"""The tokenizer against Meta's own, and tokenizers that cannot be used."""

import json
import os
from pathlib import Path

import pytest
from chats import turns
from llama3_tokenizer import build_tiny_tokenizer, tiny_tokenizer
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from patch.data.chat_templates import LLAMA3_CHAT_TEMPLATE, ensure_chat_template
from patch.data.formats.turns import Text
from patch.data.rendering.chat import ChatRenderer
from patch.data.tokenizer import (
    check_vocabulary,
    load_tokenizer,
    padding_id,
    special_tokens,
    vocabulary_size,
)
from patch.errors import DataError

TEXTS = (
    "Hello, world! It's 12345 o'clock.\n\n  Two  spaces\t tab\r\n",
    "你好，世界！今天的天气怎么样？１２３",
    "def f(x):\n    return x ** 2  # naïve café 🙂🙃",
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>",
    " leading and trailing ",
    "\n\n\n",
)


@pytest.mark.long
def test_real_llama3_tokenizer_and_the_built_in_template_are_metas_own(llama3_folder: Path) -> None:
    """The second implementation is Meta's package: its tokenizer, and its format of a dialog."""
    chat_format = pytest.importorskip("llama_models.llama3.chat_format")
    datatypes = pytest.importorskip("llama_models.datatypes")
    tokenizer, meta = load_tokenizer(str(llama3_folder)), chat_format.Tokenizer.get_instance()
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == meta.encode(text, bos=False, eos=False, allowed_special="all")
        assert tokenizer(text)["input_ids"] == [128000, *ids]
        assert tokenizer.decode(ids) == text
    expected = {
        "<|begin_of_text|>": 128000, "<|end_of_text|>": 128001, "<|start_header_id|>": 128006,
        "<|end_header_id|>": 128007, "<|eot_id|>": 128009,
    }  # fmt: skip
    assert {token: tokenizer.convert_tokens_to_ids(token) for token in expected} == expected
    assert {token: meta.special_tokens[token] for token in expected} == expected
    assert vocabulary_size(tokenizer) == 128256 == meta.n_words
    assert len(special_tokens(tokenizer)) == 256


    ensure_chat_template(tokenizer)
    dialog = turns("Wie heißt du?", "我叫小明。\n\nOk?", "1234", system="Be brief.")
    stop = {"assistant": {"stop_reason": datatypes.StopReason.end_of_turn}}
    raw = [datatypes.RawMessage(**message, **stop.get(message["role"], {})) for message in dialog]
    ids = tokenizer.apply_chat_template(dialog, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids == chat_format.ChatFormat(meta).encode_dialog_prompt(raw).tokens


def test_folder_that_is_no_tokenizer_says_what_is_expected(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text('{"version": "1.0"')
    for folder, said in (
        (str(tmp_path / "absent"), r"absent is not a folder; .* of a Hugging Face tokenizer$"),
        (None, "no folder is named"),
        (str(tmp_path), "has none of tokenizer.json, tokenizer.model"),
        (str(tmp_path / "broken"), "cannot be loaded"),
    ):
        with pytest.raises(DataError, match=said) as caught:
            load_tokenizer(folder)
        assert caught.value.field == "tokenizer_name_or_path"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"])
def test_pipe_or_endless_file_among_the_tokenizers_is_refused(tmp_path: Path, name: str) -> None:
    build_tiny_tokenizer(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=f"{tmp_path / name} is a pipe, a device or larger than 536870912"):
        load_tokenizer(str(tmp_path))
    (tmp_path / name).unlink()
    (tmp_path / name).touch()
    os.truncate(tmp_path / name, 1 << 33)
    with pytest.raises(DataError, match=f"{tmp_path / name} is a pipe, a device or larger"):
        load_tokenizer(str(tmp_path))


def test_padding_of_the_file_never_acts_and_an_endless_id_is_refused(tmp_path: Path) -> None:
    build_tiny_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    described = json.loads(file.read_text()) | {"post_processor": None}
    padding = {"strategy": {"Fixed": 4}, "direction": "Left", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<|begin_of_text|>"}
    cut = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps(described | {"padding": padding, "truncation": cut}))
    ((answer,),) = ChatRenderer(load_tokenizer(tmp_path)).render(Text("hello", "row"))
    assert answer.text == "hello<|end_of_text|>"
    described["model"]["vocab"]["endless"] = 2**31 - 1
    file.write_text(json.dumps(described))
    with pytest.raises(DataError, match="has an id 2147483647, expected at most 16777216"):
        load_tokenizer(tmp_path)


def test_code_in_the_folder_is_not_run(tmp_path: Path) -> None:
    build_tiny_tokenizer(tmp_path)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}'
    )
    try:
        load_tokenizer(str(tmp_path))
    except DataError:
        pass
    assert not (tmp_path / "ran").exists()


def test_gaps_between_ids_count_as_vocabulary() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0, "b": 6}, [])))
    assert len(tokenizer) == 2
    check_vocabulary(tokenizer, 7)
    with pytest.raises(DataError, match="ids up to 6 .b., the model's vocabulary has 6 rows"):
        check_vocabulary(tokenizer, 6)


def test_built_in_template_is_said_and_saved_and_a_tokenizers_own_is_left_alone(
    tmp_path: Path, logged: list[str]
) -> None:
    own, without = tiny_tokenizer(template="{{ messages[0].content }}"), tiny_tokenizer()
    ensure_chat_template(own)
    assert own.chat_template == "{{ messages[0].content }}" and not logged
    ensure_chat_template(without)
    assert any("no chat template" in message for message in logged)
    without.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == LLAMA3_CHAT_TEMPLATE


def test_padding_is_pad_else_eos_else_zero() -> None:
    tokenizer = tiny_tokenizer()
    assert padding_id(tokenizer) == tokenizer.eos_token_id
    tokenizer.pad_token = "<|finetune_right_pad_id|>"
    assert padding_id(tokenizer) == 4
    tokenizer.pad_token = tokenizer.eos_token = None
    assert padding_id(tokenizer) == 0
