"""A small model with its tokenizer, and a few rows of the quickstart's data."""

import json
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest

from toolkits.quickstart.seed_model import write_model, write_tokenizer
from toolkits.quickstart.tasks import make_examples, to_row


class Office(NamedTuple):
    """Paths of what a run starts from."""

    model: Path
    train: Path
    valid: Path
    num_valid: int = 16
    seed: int = 7

    def positions(self, output: Path) -> dict[str, Path]:
        """The four positions that name paths."""
        return {
            "DATASET_PATH": self.train,
            "VALID_DATASET_PATH": self.valid,
            "PRETRAIN_CHECKPOINT_PATH": self.model,
            "OUTPUT_BASEPATH": output,
        }


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Office:
    folder = tmp_path_factory.mktemp("office")
    made = Office(folder / "model", folder / "train.jsonl", folder / "valid.json")
    train, held_out = make_examples(num_train=400, num_held_out=made.num_valid, seed=made.seed)
    tokenizer = write_tokenizer(made.model, chain.from_iterable((e.question, e.answer) for e in train))
    write_model(made.model, tokenizer, seed=made.seed)
    made.train.write_text("".join(json.dumps(to_row(e, index)) + "\n" for index, e in enumerate(train)))
    made.valid.write_text(json.dumps([to_row(e, index) for index, e in enumerate(held_out)]))
    return made
