"""Common parts of the command lines: an argument parser, argument types, exit codes of errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from patch.storage.remote import is_url
from patch.text import NEGATIVE, to_int

if TYPE_CHECKING:
    from rich.console import Console

TABLE_WIDTH = 160
"""Columns of tables if the output is not a terminal."""


def typed(module: str) -> str:
    """Return the command as the user typed it: `llama-patch WORD`, or `python -m toolkits.MODULE`."""
    program, *words = sys.argv
    return f"llama-patch {words[0]}" if words and Path(program).name == "llama-patch" else module


class ArgumentParser(argparse.ArgumentParser):
    """Argument parser that refuses an unknown flag first, and names the nearest known flag.

    argparse alone would report the missing arguments that a misspelled flag leaves. Flags cannot be
    abbreviated. `--help` prints the description without wrapping its lines.

    Args:
        gone: flag of an earlier version -> what to use instead.
        settings: arguments of `argparse.ArgumentParser`.
    """

    def __init__(self, gone: Mapping[str, str] = MappingProxyType({}), **settings: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, formatter_class=formatter, **settings)
        self._negative_number_matcher = NEGATIVE
        self._gone = gone

    def parse_known_args(  # type: ignore[override]  # its overloads differ in the namespace's type only
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse as argparse does. An unknown flag ends the program with exit code 2."""
        args = sys.argv[1:] if args is None else args
        known = self._option_string_actions
        for text in takewhile(lambda text: text != "--", args):
            flag = text.split("=")[0]
            if flag.startswith("--") and flag not in known:
                self._refuse(flag, [name for name in known if name.startswith("--")])
        return super().parse_known_args(args, namespace)

    def _refuse(self, flag: str, known: list[str]) -> None:
        from patch.config.foreign_flags import nearest_flag

        if flag in self._gone:
            self.error(f"{flag} was removed: {self._gone[flag]}")
        self.error(f"unknown argument {flag}{nearest_flag(flag, known)} (--help lists the flags)")


def exit_code_of(work: Callable[[], int | None], say: Callable[[Any], str] = str) -> int:
    """Run a tool and return its exit code. An error is printed without a traceback.

    Args:
        work: the tool after its arguments were parsed. Its OSErrors are reported as CheckpointErrors.
        say: returns the text of an error. Tools that take the flags of a run pass `user_message`, which
            names the flag.
    """
    from patch.errors import CheckpointError, PatchError
    from patch.logger import configure_logging

    configure_logging()
    try:
        return work() or 0
    except (PatchError, OSError) as error:
        own = error if isinstance(error, PatchError) else CheckpointError(str(error))
        print(f"ERROR {say(own)}", file=sys.stderr)
        return own.exit_code


def console(**options: Any) -> Console:
    """Return rich's console with these options, by default as wide as stdout, or 160 columns without one."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else TABLE_WIDTH
    return Console(**{"width": width, "highlight": False, "markup": False, "emoji": False, **options})


def at_dashes(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split a command line at `--` into the tool's own arguments and the arguments of a run."""
    place = argv.index("--") if "--" in argv else len(argv)
    return argv[:place], argv[place + 1 :]


def positive(text: str, most: int = 2**63 - 1) -> int:
    """Return a whole number from 1 to `most`, as an `argparse` type."""
    from patch.errors import shown

    number = to_int(text)
    if number is None or not 1 <= number <= most:
        to_most = f" from 1 to {most}" if most < 2**63 - 1 else ", at least 1"
        raise argparse.ArgumentTypeError(f"got {shown(text)}, expected a whole number{to_most}")
    return number


def members(text: str) -> int:
    """Return a number of machines, devices or processes, as an `argparse` type."""
    return positive(text, 100_000)


def local(text: str) -> Path:
    """Return a local path, as an `argparse` type. A URL is refused without printing its secrets."""
    if is_url(text):
        scheme = text.partition("://")[0]
        raise argparse.ArgumentTypeError(f"got a URL ({scheme}://...), expected a path on this machine")
    return Path(text)


def output_file(text: str) -> Path:
    """Return the path of a file to write, as an `argparse` type. Its folder must exist."""
    file = Path(text)
    if not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"got {text}, expected a file in a folder that is there")
    return file
