"""Errors that a user can cure, each with the exit code of the launcher.

A message says what failed, what was got and what was expected; `field` names the value that cures it.
`assert` is for our own invariants only: whatever a user can cause raises one of these errors.
"""

import difflib
import re
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager


class PatchError(Exception):
    """Base of all errors a user can cure. `exit_code` is what the launcher returns.

    Args:
        message: what failed, what was got, what was expected.
        field: the field of the configuration that cures it, such as `output_path`; None if there is none.
            The entry point turns it into a flag and a position (`patch.config.user_message`).
    """

    exit_code = 1
    may_restart = False
    """Whether --max-restarts starts the run again: not if it would fail again."""

    def __init__(self, message: str = "", *, field: str | None = None) -> None:
        super().__init__(printable(without_secrets(message)))
        self.field = field


class ConfigError(PatchError, ValueError):
    """A configuration that cannot run; raised before any process is started."""

    exit_code = 2


class DataError(PatchError, ValueError):
    """A data set, row or tokenizer that cannot be used."""

    exit_code = 3


class CheckpointError(PatchError, RuntimeError):
    """A checkpoint that cannot be written or read, or that does not fit the model."""

    exit_code = 4


class ConversionError(PatchError, ValueError):
    """A Hugging Face folder that cannot be read or written, or that does not fit the model."""

    exit_code = 4


class TrainingError(PatchError, RuntimeError):
    """Training stopped itself: non-finite gradients, a hang, out of memory."""

    exit_code = 5


class MemoryLackError(TrainingError):
    """A process ran out of memory.

    Args:
        message: what failed.
        on_device: whether a GPU, or the simulated one, lacked memory, not the host.
    """

    def __init__(self, message: str = "", *, on_device: bool) -> None:
        super().__init__(message)
        self.on_device = on_device


_SECRETS = re.compile(
    r"([A-Za-z][\w+.-]*:/{1,2})[^\s'\"]*:[^\s'\"]*@"  # a password, after a name
    r"|([A-Za-z][\w+.-]*:/{1,2}[^\s'\"?]*[?])[^\s'\"]+"  # a query
)


def without_secrets(text: str) -> str:
    """A text without the passwords and queries of its URLs; a key may have slashes."""
    return _SECRETS.sub(lambda found: f"{found[1]}...@" if found[1] else f"{found[2]}...", text)


def printable(text: str) -> str:
    """A text that no control character of a file can act in: each is written as its escape, such as \\x1b.

    A line feed stays where the next line is indented, so a text of a file cannot begin a line of the log.
    """
    lines = re.split(r"\n(?=  )", text)
    return "\n".join("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line) for line in lines)


@contextmanager
def about(field: str) -> Iterator[None]:
    """Errors from within that name no field are about this one."""
    try:
        yield
    except PatchError as error:
        error.field = error.field or field
        raise


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxlevel = 3


def shown(value: object) -> str:
    """A wrong value for a message, which has no more than a few hundred characters of it."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # as `repr` for such a number
        return "a number of thousands of digits"


def nearest(name: str, known: list[str], likeness: float = 0.6) -> str:
    """A hint ", did you mean X?" for a misspelled name, or "" when no known name is close.

    Args:
        name: what was written.
        known: the names that are meant.
        likeness: how much two names must share, between 0 and 1 (all).
    """
    if len(name) > 3 * max(map(len, known), default=0):  # no name is close, and the search would be slow
        return ""
    match = difflib.get_close_matches(name, known, n=1, cutoff=likeness)
    return f", did you mean {match[0]}?" if match else ""
