"""Five kills around saves; tests/random_kills.py has the fifty."""

from pathlib import Path

import pytest
from random_kills import Killing

pytestmark = pytest.mark.long


@pytest.mark.parametrize("lora_rank", [0, 3])
def test_killed_runs_go_on_from_the_newest_checkpoint_and_end_with_the_same_bytes(
    tmp_path: Path, lora_rank: int
) -> None:
    killing = Killing(tmp_path, is_async=True, seed=13, lora_rank=lora_rank)
    killing.run(5)
    assert len(killing.hits) == 5
