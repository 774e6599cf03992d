"""Common parts of command lines: a parser that suggests flags, types, how errors end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any

from patch.numbers import NEGATIVE, to_int
from patch.storage.remote import is_url


def typed(module: str) -> str:
    """The command that was typed: llama-patch WORD, or python -m toolkits.MODULE."""
    program, *words = sys.argv
    return f"llama-patch {words[0]}" if words and Path(program).name == "llama-patch" else module


class ArgumentParser(argparse.ArgumentParser):
    """A parser that takes whole flags only, and refuses an unknown one first of all, with the nearest flag.

    argparse alone would complain of what a misspelled flag leaves missing. A description is shown as written.

    Args:
        gone: flags of earlier versions, with what to use instead.
        settings: of argparse's parser.
    """

    def __init__(self, gone: Mapping[str, str] = MappingProxyType({}), **settings: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, formatter_class=formatter, **settings)
        self._negative_number_matcher = NEGATIVE
        self._gone = gone

    def parse_known_args(  # type: ignore[override]  # its overloads differ in the namespace's type only
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """The result of argparse's method; unknown flags end the program with exit code 2."""
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
    """The exit code of a tool's work, 0 for None, or of an error, which is told without a traceback.

    Args:
        work: the tool, after its arguments were read; an OSError in it is one of a checkpoint.
        say: what is told of an error; for tools that take a run's flags `user_message`, which names them.
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


def at_dashes(argv: list[str]) -> tuple[list[str], list[str]]:
    """A tool's own arguments, and those of a run after `--`."""
    place = argv.index("--") if "--" in argv else len(argv)
    return argv[:place], argv[place + 1 :]


def positive(text: str, most: int = 2**63 - 1) -> int:
    """A whole number from 1 to `most`, for `argparse`'s `type`."""
    from patch.errors import shown

    number = to_int(text)
    if number is None or not 1 <= number <= most:
        raise argparse.ArgumentTypeError(f"got {shown(text)}, expected a whole number from 1 to {most}")
    return number


def members(text: str) -> int:
    """A number of machines, devices or processes, for `argparse`'s `type`."""
    return positive(text, 100_000)


def local(text: str) -> Path:
    """A path on this machine, for `argparse`'s `type`; a URL is refused without what may be secret in it."""
    if is_url(text):
        scheme = text.partition("://")[0]
        raise argparse.ArgumentTypeError(f"got a URL ({scheme}://...), expected a path on this machine")
    return Path(text)


def output_file(text: str) -> Path:
    """A file to be written, for `argparse`'s `type`: its folder is there before the work begins."""
    file = Path(text)
    if not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"got {text}, expected a file in a folder that is there")
    return file
