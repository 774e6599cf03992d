"""Errors that a user can fix, each with the exit code of the launcher.

A message says what failed, what was got and what was expected; `field` names the value to change.
`assert` is for our own invariants only: every user mistake raises one of these errors.
"""

import difflib
import re
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager


class PatchError(Exception):
    """Base of all errors that a user can fix. The launcher returns `exit_code`.

    Args:
        field: the configuration field to change, such as `output_path`, or None if there is none. The entry
            point turns it into a flag and a position (`patch.config.user_message`).
    """

    exit_code = 1
    may_restart = False
    """Whether --max-restarts starts the run again; False if the restarted run would fail again."""

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
    """A process ran out of memory: a GPU's (or the simulated GPU's) if `on_device`, otherwise the host's."""

    def __init__(self, message: str = "", *, on_device: bool) -> None:
        super().__init__(message)
        self.on_device = on_device


_SECRETS = re.compile(
    r"([A-Za-z][\w+.-]*:/{1,2})[^\s'\"]*:[^\s'\"]*@"  # a password, after a name
    r"|([A-Za-z][\w+.-]*:/{1,2}[^\s'\"?]*[?])[^\s'\"]+"  # a query
)


def without_secrets(text: str) -> str:
    """Remove passwords and queries from the URLs in a text; a password may contain slashes."""
    return _SECRETS.sub(lambda found: f"{found[1]}...@" if found[1] else f"{found[2]}...", text)


def printable(text: str) -> str:
    """Escape the control characters in a text, as in \\x1b, so that they cannot act on a terminal.

    A line feed stays if the next line is indented, so the text cannot begin a new line of the log.
    """
    lines = re.split(r"\n(?=  )", text)
    return "\n".join("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line) for line in lines)


@contextmanager
def about(field: str) -> Iterator[None]:
    """Set this field in errors from the block that name no field."""
    try:
        yield
    except PatchError as error:
        error.field = error.field or field
        raise


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxlevel = 3


def shown(value: object) -> str:
    """Format a wrong value for a message, shortened to a few hundred characters."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # `repr` refuses such a number
        return "a number of thousands of digits"


def nearest(name: str, known: list[str], likeness: float = 0.6) -> str:
    """Return a hint ", did you mean X?" for a misspelled name, or "" if no known name is close.

    Args:
        likeness: share of two names that must match, between 0 and 1.
    """
    if len(name) > 3 * max(map(len, known), default=0):  # no name is close, and the search would be slow
        return ""
    match = [each for each in known if each.lower() == name.lower()]
    match = match or difflib.get_close_matches(name, known, n=1, cutoff=likeness)
    return f", did you mean {match[0]}?" if match else ""
