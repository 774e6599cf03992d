"""What the data tests share: the real LLaMA-3 tokenizer."""

from pathlib import Path

import pytest
from llama3_tokenizer import build_llama3_tokenizer


@pytest.fixture(scope="session")
def llama3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama3")
    build_llama3_tokenizer(folder)
    return folder
