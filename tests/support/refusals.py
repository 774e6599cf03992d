"""What a user reads when something is refused: `pytest.raises` on the message that the entry point prints.

And what must never run: code in a file.
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
    """The block raises `kind`, and `match` is found in the message with its flag and position."""
    with pytest.raises(kind) as caught:
        yield caught
    assert re.search(match, user_message(caught.value)), user_message(caught.value)


class Payload:
    """Leaves a folder on the disk when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.mark),)
