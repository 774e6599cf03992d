"""Small model with its tokenizer, and a few rows of the quickstart's data."""

from pathlib import Path
from typing import NamedTuple

import pytest

from toolkits.quickstart.tasks import Example
from toolkits.quickstart.workspace import prepare


class Office(NamedTuple):
    model: Path
    train: Path
    valid: Path
    held_out: list[Example]
    """Rows of `valid`."""

    def positions(self, output: Path) -> dict[str, Path]:
        return {
            "DATASET_PATH": self.train,
            "VALID_DATASET_PATH": self.valid,
            "PRETRAIN_CHECKPOINT_PATH": self.model,
            "OUTPUT_BASEPATH": output,
        }


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Office:
    space, held_out = prepare(tmp_path_factory.mktemp("office"), num_held_out=16, num_train=400)
    return Office(space.model, space.train_data, space.valid_data, held_out)
