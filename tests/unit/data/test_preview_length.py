"""What --dry-run says of a run's length, against what is counted by hand and what the run itself takes."""

import io
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from indexed_sets import write_set
from llama3_tokenizer import build_tiny_tokenizer
from refusals import refused
from small_runs import small_run

from patch.config import RunConfig
from patch.data.datasets import build_datasets
from patch.data.preview.preview import show_data
from patch.data.tokenizer import load_tokenizer
from patch.errors import ConfigError, DataError
from patch.plan.describe import describe_length

LENGTH = 32
ROWS = [
    {"instruction": "hello", "output": "world"},  # 12 tokens without the last one
    {"instruction": "hello", "output": "the quick"},
    {"instruction": "hello", "output": ""},  # dropped
]


def write(folder: Path, rows: list, name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tiny_tokenizer(folder)
    return str(folder)


@pytest.fixture
def run(tokenizer: str, tmp_path: Path) -> Callable[..., RunConfig]:
    """Makes a run on some data."""

    def make(data: object, **changes) -> RunConfig:
        changes = {"lr_warmup_iters": 1, "max_dropped_share": 0.5, "vocab_size": 400, **changes}
        paths = {"output_path": str(tmp_path / "out"), "cache_dir": str(tmp_path / "cache")}
        return small_run(train_data_path=str(data), tokenizer_name_or_path=tokenizer, **paths, **changes)

    return make


def said(config: RunConfig) -> list[str]:
    """The last lines of the dry run."""
    stream = io.StringIO()
    samples = show_data(
        config.data, config.model, config.tokenizer_folder, sft=config.training.sft,
        output=Path(config.checkpoint.output_path), stream=stream,
    )  # fmt: skip
    lines = [line for line in stream.getvalue().splitlines() if line.startswith("data  ")]
    return lines if samples is None else [*lines, *describe_length(config, samples).splitlines()]


def train(config: RunConfig) -> int:
    """The samples that the run itself takes, whose token cache is then there."""
    tokenizer, folder = load_tokenizer(config.tokenizer_folder), Path(config.checkpoint.output_path)
    settings = {"sft": config.training.sft, "num_train_samples": lambda each: each, "seed": 1}
    sets = build_datasets(config.data, config.model, tokenizer, **settings, index_folder=folder / "index")
    return sets.num_train_samples


@pytest.mark.parametrize(
    ("repeats", "changes", "samples", "length"),
    [
        (1, {"train_epochs": 5, "train_iters": 0}, "2 samples", "3 steps = 6 epochs of 2"),  # batches of 4
        (1, {"train_iters": 7}, "2 samples", "7 steps = 14 epochs of 2"),
        # 10 rows of 12 and 14 tokens: two a pack
        (5, {"packing": True}, "5 samples (packs)", "20 steps = 16 epochs of 5"),
    ],
)
def test_length_of_a_small_set_follows_from_its_rows(
    repeats: int, changes: dict, samples: str, length: str, run, tmp_path: Path
) -> None:
    rows = write(tmp_path, ROWS * repeats)
    config = run(rows, **changes)
    *lines, last = said(config)
    if config.training.train_epochs is None:
        lines.append(last)
    else:
        rates = "0.002, 0.002, 0.00105, 0.00105, 0.0001"
        assert last == f"rate        {rates} at 0, 25, 50, 75, 100 % of 3 steps (cosine)"
    assert lines == [f"data        {rows}: {samples} in one epoch", f"length      {length} samples"]
    assert list(tmp_path.iterdir()) == [rows]
    if config.data.packing:
        assert train(config) == 5


@pytest.mark.long
def test_a_large_set_is_known_once_it_is_tokenized_and_until_it_changes(run, tmp_path: Path) -> None:
    rows = write(tmp_path, [{**row, "note": "x" * 2**19} for row in ROWS])
    small = write(tmp_path, ROWS[:1], "small.jsonl")
    config = run(f"0.5 {small} 0.5 {rows}")
    known, unknown = said(config)
    assert known == f"data        {small}: 1 sample in one epoch"
    assert f"{rows}: its samples are counted when it is tokenized" in unknown
    assert "llama-patch preview" in unknown
    time.sleep(2.1)  # the hash of a file that was just written is not remembered
    assert train(config) == 3
    found = f"data        {rows}: 2 samples in one epoch"
    assert said(config) == [known, found, "length      20 steps = 26.7 epochs of 3 samples"]
    assert len(said(run(rows, max_padding_length=20))) == 1  # other tokens
    rows.write_text(rows.read_text() + "\n")
    assert len(said(config)) == 2


def test_every_row_of_a_small_set_is_checked(run, tmp_path: Path) -> None:
    rows = write(tmp_path, [*ROWS, {"question": "no answer"}])
    with pytest.raises(DataError, match="rows.jsonl: line 4"):
        said(run(rows))


def test_a_warm_up_that_epochs_do_not_hold_is_refused_before_the_run(run, tmp_path: Path) -> None:
    config = run(write(tmp_path, ROWS), train_epochs=1, train_iters=0)
    with refused(ConfigError, r"position 24 .*: got 1, expected less than the run's 1"):
        said(config)


def test_documents_are_counted_as_the_run_counts_them(run, tmp_path: Path) -> None:
    prefix = write_set(tmp_path / "set", [range(size) for size in (100, 60, 300, 40)])
    kind = {"dataset_type": "idxmap", "sft": "false"}
    config = run(prefix, **kind)
    assert said(config)[0] == f"data        {prefix}: 15 samples in one epoch"  # 499 // 32
    assert train(config) == 15
    config = run(prefix, **kind, split="50,50,0")
    assert said(config)[-1] == "length      20 steps = 20 epochs of 4 samples" and train(config) == 4


def test_pais_samples_are_its_documents(run, tmp_path: Path) -> None:
    prefix = write_set(tmp_path / "set", [[*range(1, 32), -1 - 32, *range(2, 33), -100]] * 3)
    config = run(prefix, dataset_type="idxmap")
    assert said(config)[0].endswith("set: 3 samples in one epoch") and train(config) == 3
