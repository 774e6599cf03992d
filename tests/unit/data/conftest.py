"""Fixtures of the data tests: the real LLaMA-3 tokenizer, and small ones with the template of a family."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import chat_template_families as families
import pytest
from llama3_tokenizer import build_llama3_tokenizer, tiny_tokenizer
from tokenizer_zoo import qwen_tokenizer, sentencepiece_tokenizer
from transformers import PreTrainedTokenizerFast

from patch.data.chat_templates import ensure_chat_template

_KINDS = {
    "LLAMA2": ("legacy", ()), "MISTRAL": ("first", families.MISTRAL_TOKENS),
    "alpaca": ("legacy", ()), "plain": ("first", ()),
}  # fmt: skip


@pytest.fixture(scope="session")
def llama3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama3")
    build_llama3_tokenizer(folder)
    return folder


@cache
def _tokenizer(family: str) -> PreTrainedTokenizerFast:
    template = getattr(families, family, None)
    if family in _KINDS:
        kind, special = _KINDS[family]
        tokenizer = sentencepiece_tokenizer(kind, template, special)
    else:
        tokenizer = (tiny_tokenizer if "llama" in family.lower() else qwen_tokenizer)(template=template)
    if template is None:
        ensure_chat_template(tokenizer, family)
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer_of() -> Callable[[str], PreTrainedTokenizerFast]:
    """The tokenizer of a family of templates (chat_template_families), or of a built-in template."""
    return _tokenizer
