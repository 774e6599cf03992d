"""Folder of the quickstart: model, tokenizer and data. The doctor and the tests use smaller ones."""

from __future__ import annotations

import json
import shutil
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

from patch.errors import ConfigError
from patch.storage.names import HF_FOLDER, METRICS_FILE
from patch.storage.text_files import parse_json, read_small
from toolkits.quickstart.seed_model import write_model, write_tokenizer
from toolkits.quickstart.tasks import Example, make_examples, to_row

NUM_TRAIN = 40_000
NUM_HELD_OUT = 200
SEED = 1
_MARKER = ".made_by_quickstart"


class Workspace(NamedTuple):
    """Paths below the quickstart's output folder."""

    root: Path

    @property
    def model(self) -> Path:
        """Model to start from, with its tokenizer."""
        return self.root / "model"

    @property
    def train_data(self) -> Path:
        """Training rows, one JSON object per line."""
        return self.root / "data" / "train.jsonl"

    @property
    def valid_data(self) -> Path:
        """Held-out rows, one JSON list."""
        return self.root / "data" / "valid.json"

    @property
    def run(self) -> Path:
        """OUTPUT_BASEPATH of the training run."""
        return self.root / "run"

    @property
    def trained(self) -> Path:
        """Trained model, a Hugging Face folder."""
        return self.run / HF_FOLDER

    def losses(self) -> dict[int, float]:
        """Return step -> training loss from the run's log/metrics.jsonl, without evaluations."""
        lines = read_small(self.run / METRICS_FILE).splitlines()
        return {each["iteration"]: each["loss"] for each in map(parse_json, lines) if "loss" in each}


def prepare(
    root: Path, num_held_out: int = NUM_HELD_OUT, seed: int = SEED, num_train: int = NUM_TRAIN
) -> tuple[Workspace, list[Example]]:
    """Write model, tokenizer and data; return their paths and the held-out examples.

    Args:
        root: the folder. If it has the trained model of an earlier quickstart, a new one beside it is used.
        num_held_out: number of questions that do not occur in training.
        seed: seed of the data and of the random weights.
        num_train: number of training rows.
    Raises:
        ConfigError: `root` contains files that no quickstart wrote. Nothing is deleted.
    """
    space = Workspace(emptied(root))
    train, held_out = make_examples(num_train=num_train, num_held_out=num_held_out, seed=seed)
    space.train_data.parent.mkdir()
    space.train_data.write_text("".join(json.dumps(row) + "\n" for row in _rows(train)))
    space.valid_data.write_text(json.dumps(_rows(held_out)))
    pairs = ((f"user\n\n{example.question}", f"assistant\n\n{example.answer}") for example in train)
    tokenizer = write_tokenizer(space.model, chain.from_iterable(pairs))
    write_model(space.model, tokenizer, seed=seed)
    return space, held_out


def _rows(examples: list[Example]) -> list[dict[str, Any]]:
    return [to_row(example, index) for index, example in enumerate(examples)]


def emptied(root: Path) -> Path:
    """Return the folder, emptied. If it has a trained model, return the first free of `root-2`, `root-3`...

    Raises:
        ConfigError: `root` contains files that no quickstart wrote.
    """
    numbered = (root.with_name(f"{root.name}-{number}") for number in count(2))
    while (root / _MARKER).exists() and Workspace(root).trained.exists():
        print(f"{root} keeps the model of an earlier quickstart", flush=True)
        root = next(numbered)
    if root.exists() and any(root.iterdir()) and not (root / _MARKER).exists():
        raise ConfigError(
            f"--output {root} contains files that no quickstart wrote, so it is not used; expected a new or "
            "empty folder, or the folder of an earlier quickstart"
        )
    root.mkdir(parents=True, exist_ok=True)
    (root / _MARKER).touch()
    for name in ("model", "data", "base", "run"):
        shutil.rmtree(root / name, ignore_errors=True)
    return root
