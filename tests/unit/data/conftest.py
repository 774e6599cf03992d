"""What the data tests share: the real LLaMA-3 tokenizer, the shared data sets."""

from pathlib import Path

import pytest
from llama3_tokenizer import build_llama3_tokenizer

SHARED_DATA = Path(__file__).resolve().parents[3].parent / "shared" / "data"


@pytest.fixture(scope="session")
def llama3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama3")
    build_llama3_tokenizer(folder)
    return folder


@pytest.fixture
def shared_data() -> Path:
    if not SHARED_DATA.is_dir():
        pytest.skip("the shared data sets are not beside this checkout")
    return SHARED_DATA
