"""What the tests of launchers leave."""

from collections.abc import Iterator

import pytest
from launches import kill_started


@pytest.fixture(autouse=True)
def no_launcher_is_left() -> Iterator[None]:
    yield
    kill_started()
