"""The real data sets, as they are, with the real LLaMA-3 tokenizer: the loss falls."""

from pathlib import Path

import pytest
from end_to_end.shell import REPOSITORY, call_workers, command, losses
from llama3_tokenizer import build_llama3_tokenizer

from toolkits.preprocess_pretrain import main as preprocess_pretrain

pytestmark = pytest.mark.long

DATA = REPOSITORY.parent / "shared" / "data"


def data_file(name: str) -> Path:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{name} is not there")
    return path


@pytest.fixture(scope="module")
def llama3_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama3")
    build_llama3_tokenizer(folder)
    return folder


@pytest.mark.parametrize("name", ["alpaca_en_demo.json", "alpaca_zh_demo.json"])
def test_alpaca_demo_trains(llama3_tokenizer: Path, tmp_path: Path, name: str) -> None:
    positions = {"MODEL_SIZE": "tiny", "SEQ_LEN": 64, "PAD_LEN": 64, "GLOBAL_BATCH_SIZE": 4, "TP": 2}
    positions |= {
        "TRAIN_TOKENS_OR_ITERS": 4,
        "DATASET_PATH": data_file(name),
        "OUTPUT_BASEPATH": tmp_path / "out",
    }
    result = call_workers(2, command(**positions), TOKENIZER_PATH=llama3_tokenizer)
    assert result.returncode == 0, result.stderr
    assert losses(tmp_path / "out")[-1] < losses(tmp_path / "out")[0] - 0.1


def test_c4_demo_pretrains(llama3_tokenizer: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "c4_text_document"
    preprocess = ["--input", str(data_file("c4_demo.jsonl")), "--output-prefix", str(tmp_path / "c4")]
    preprocess += ["--tokenizer-name-or-path", str(llama3_tokenizer)]
    assert preprocess_pretrain(preprocess) == 0
    tokens_per_step = 4 * 64
    positions = {"MODEL_SIZE": "tiny", "SEQ_LEN": 64, "PAD_LEN": 64, "SFT": "false", "DATASET_PATH": prefix}
    positions |= {"TRAIN_TOKENS_OR_ITERS": 4 * tokens_per_step, "WARMUP_TOKENS_OR_ITERS": 2 * tokens_per_step}
    positions |= {"GLOBAL_BATCH_SIZE": 4, "TP": 2, "OUTPUT_BASEPATH": tmp_path / "out"}
    variables = {"TOKENIZER_PATH": llama3_tokenizer, "MP_DATASET_TYPE": "idxmap"}
    result = call_workers(2, command(**positions), **variables)
    assert result.returncode == 0, result.stderr
    values = losses(tmp_path / "out")
    assert len(values) == 4
    assert values[-1] < values[0] - 0.1
