"""Checks of refusals: `pytest.raises` on the message that the entry point prints to the user.

Also a payload that shows whether code of a file was executed.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from patch.config import user_message
from patch.errors import PatchError


@contextmanager
def refused(kind: type[PatchError], match: str) -> Iterator[pytest.ExceptionInfo]:
    """Expect that the block raises `kind`, and that its message with flag and position contains `match`."""
    with pytest.raises(kind) as caught:
        yield caught
    assert re.search(match, user_message(caught.value)), user_message(caught.value)


class Payload:
    """Creates a folder on the disk when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.mark),)
