"""Five kills around saves; tests/random_kills.py has the fifty."""

from pathlib import Path

import pytest
from random_kills import Killing

pytestmark = pytest.mark.long


@pytest.mark.parametrize("kind", ["host", "lora"])
def test_killed_runs_go_on_from_the_newest_checkpoint_and_end_with_the_same_bytes(
    tmp_path: Path, kind: str
) -> None:
    killing = Killing(tmp_path, is_async=True, seed=13, kind=kind)
    killing.run(5)
    assert len(killing.hits) == 5
    if kind == "host":
        assert (tmp_path / "states").is_dir() and not any((tmp_path / "states").iterdir())
