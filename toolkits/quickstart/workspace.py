"""Folder of the quickstart: model, tokenizer and data. The doctor and the tests use smaller ones."""

from __future__ import annotations

import json
import shutil
from itertools import chain, count
from pathlib import Path
from typing import Any

from patch.errors import ConfigError
from patch.storage.names import HF_FOLDER, METRICS_FILE
from patch.storage.text_files import parse_json, read_small
from toolkits.quickstart.seed_model import write_model, write_tokenizer
from toolkits.quickstart.tasks import Example, make_examples, to_row

NUM_TRAIN = 40_000
NUM_HELD_OUT = 200
SEED = 1
"""Seed of the data and of the random weights."""
_MARKER = ".made_by_quickstart"


class Workspace:
    """Paths below the quickstart's output folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.model = root / "model"
        """Model to start from, with its tokenizer."""
        self.train_data = root / "data" / "train.jsonl"
        """Training rows, one JSON object per line."""
        self.valid_data = root / "data" / "valid.json"
        """Held-out rows, one JSON list."""
        self.run = root / "run"
        """OUTPUT_BASEPATH of the training run."""
        self.trained = self.run / HF_FOLDER
        """Trained model, a Hugging Face folder."""

    def losses(self) -> dict[int, float]:
        """Return step -> training loss from the run's log/metrics.jsonl, without evaluations."""
        lines = read_small(self.run / METRICS_FILE).splitlines()
        return {each["iteration"]: each["loss"] for each in map(parse_json, lines) if "loss" in each}


def prepare(
    root: Path, num_held_out: int = NUM_HELD_OUT, num_train: int = NUM_TRAIN
) -> tuple[Workspace, list[Example]]:
    """Write model, tokenizer and data; return their paths and the held-out examples.

    Args:
        root: the folder. If it has the trained model of an earlier quickstart, a new one beside it is used.
        num_held_out: number of questions that do not occur in training.
        num_train: number of training rows.
    Raises:
        ConfigError: `root` contains files that no quickstart wrote. Nothing is deleted.
    """
    space = Workspace(emptied(root))
    train, held_out = make_examples(num_train=num_train, num_held_out=num_held_out, seed=SEED)
    space.train_data.parent.mkdir()
    space.train_data.write_text("".join(json.dumps(row) + "\n" for row in _rows(train)))
    space.valid_data.write_text(json.dumps(_rows(held_out)))
    pairs = ((f"user\n\n{example.question}", f"assistant\n\n{example.answer}") for example in train)
    tokenizer = write_tokenizer(space.model, chain.from_iterable(pairs))
    write_model(space.model, tokenizer, seed=SEED)
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
