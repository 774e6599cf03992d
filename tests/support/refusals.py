"""What a user reads when something is refused: `pytest.raises` on the message that the entry point prints."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from patch.config import user_message
from patch.errors import PatchError


@contextmanager
def refused(kind: type[PatchError], match: str) -> Iterator[pytest.ExceptionInfo]:
    """The block raises `kind`, and `match` is found in the message with its flag and position."""
    with pytest.raises(kind) as caught:
        yield caught
    assert re.search(match, user_message(caught.value)), user_message(caught.value)
