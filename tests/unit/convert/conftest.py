"""What the tests of the converter share."""

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast


def _tiny_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    vocabulary = {"<s>": 0, "</s>": 1, "<|eot_id|>": 2, "a": 3}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="a")),
        bos_token="<s>", eos_token="</s>", chat_template=chat_template,
        additional_special_tokens=["<|eot_id|>"],
    )  # fmt: skip


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """Makes a tokenizer of four tokens: bos 0, eos 1, LLaMA-3's end of turn 2."""
    return _tiny_tokenizer
