"""A dataclass field that is also a flag, with its help text and its legal range."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple


class Bounds(NamedTuple):
    """The legal range of a number; None for an open side."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    multiple_of: int | None = None

    def hold(self, value: float) -> bool:
        """Return whether the value is legal."""
        return not (
            (self.at_least is not None and value < self.at_least)
            or (self.above is not None and value <= self.above)
            or (self.at_most is not None and value > self.at_most)
            or (self.below is not None and value >= self.below)
            or (self.multiple_of is not None and value % self.multiple_of)
        )

    def __str__(self) -> str:
        """Return the legal range in words: `0 to 1`, `at least 0 and below 1`."""
        if self.at_least is not None and self.at_most is not None:
            return f"{self.at_least} to {self.at_most}"
        words = {
            "at least": self.at_least,
            "more than": self.above,
            "at most": self.at_most,
            "below": self.below,
            "a multiple of": self.multiple_of,
        }
        return " and ".join(f"{word} {bound}" for word, bound in words.items() if bound is not None)


def flag(
    help: str,
    default: Any = dataclasses.MISSING,
    *,
    none: str | int | None = None,
    is_path: bool = False,
    **bounds: float,
) -> Any:
    """Return a dataclass field that is also a command-line flag.

    Args:
        default: the value if nothing else sets the field; if `none` is given, None by default.
        none: the word or number that flags, positions and YAML write for None; needed for `| None` fields. If
            it is a number, it is also the least legal value.
        is_path: whether a relative value becomes absolute; machines may have other values.
    """
    if none is not None and default is dataclasses.MISSING:
        default = None
    if isinstance(none, int) and "above" not in bounds:
        bounds.setdefault("at_least", none)
    metadata = {"help": help, "none": none, "is_path": is_path, "bounds": Bounds(**bounds)}  # type: ignore[arg-type]
    return dataclasses.field(default=default, metadata=metadata)
