"""Report on the rows of a set: counts, and the places of the first rows of each kind."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from patch.config.choices import LongSamples
from patch.config.positions import where
from patch.data.sft.rows import TokenizedRow
from patch.errors import DataError
from patch.logger import get_logger

_logger = get_logger(__name__)

_PLACES = 5
"""Rows of each kind whose places are listed."""

_CUTS: dict[LongSamples, str] = {
    "cut-end": "cut to",
    "cut-begin": "cut at the begin to",
    "split": "split into samples of",
    "drop": "over",
}


@dataclass
class Rows:
    """Rows of one kind."""

    count: int = 0
    first: list[str] = field(default_factory=list)
    """Places of the first rows, such as "line 7"."""

    def add(self, place: str) -> None:
        """Count a row."""
        self.count += 1
        if len(self.first) < _PLACES:
            self.first.append(place)

    def __str__(self) -> str:
        return ", ".join(self.first) + (", ..." if self.count > len(self.first) else "")


@dataclass
class SetReport:
    """Report on the rows of a set. It is stored as JSON beside the tokens. `tokens` and `learned` count the
    samples that are kept."""

    length: int
    """Tokens of a sample."""
    long_samples: LongSamples
    allow_special_tokens: bool
    pairs: bool = False
    """Whether each row gives two samples that fit into one sequence together. Then a row is a pair."""
    rows: int = 0
    samples: int = 0
    tokens: int = 0
    learned: int = 0
    longest: int = 0
    """Tokens of the longest row with trained tokens, before truncation. A text that is too long to be encoded
    as a whole counts with its encoded part."""
    dropped: dict[str, Rows] = field(default_factory=dict)
    """Dropped rows, by reason."""
    longest_dropped: int = 0
    """Tokens of the longest row that is dropped because of its length."""
    cut: Rows = field(default_factory=Rows)
    """Rows that are longer than a sample, and not dropped."""
    unlearned: int = 0
    """Truncated rows that lost trained tokens."""
    special: Rows = field(default_factory=Rows)
    """Rows whose text spells out a special token."""
    partly_encoded: Rows = field(default_factory=Rows)
    """Rows so long that only a part of them was encoded."""
    unseen_columns: dict[str, str] = field(default_factory=dict)
    """Columns of `--columns` that no row has: our name to the column."""

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> SetReport:
        """Return the report from the values of `to_json`.

        Raises:
            KeyError, TypeError: `to_json` did not make the values.
        """
        rows = {name: Rows(**values[name]) for name in ("cut", "special", "partly_encoded")}
        dropped = {reason: Rows(**kept) for reason, kept in values["dropped"].items()}
        return cls(**{**values, **rows, "dropped": dropped})

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self)

    @property
    def num_dropped(self) -> int:
        """Rows that give no sample."""
        return sum(rows.count for rows in self.dropped.values())

    @property
    def found(self) -> tuple[int, str]:
        """Number of samples or pairs of the rows, and which of the two is counted."""
        return (self.samples // 2, "pairs") if self.pairs else (self.samples, "samples")

    def add(self, place: str, row: TokenizedRow) -> None:
        """Count a row; `place` is its name in the log."""
        self.rows += 1
        self.samples += len(row.sizes)
        self.tokens += sum(row.sizes) - len(row.sizes)  # a sample's last token is only a target
        self.learned += row.num_learned
        self.longest = max(self.longest, row.longest)
        if row.dropped is not None:
            self.dropped.setdefault(row.dropped, Rows()).add(place)
            self.longest_dropped = max(self.longest_dropped, row.longest)
        elif row.longest > self.length:
            self.cut.add(place)
            self.unlearned += row.loses_learned
        if row.is_special:
            self.special.add(place)
        if row.is_partly_encoded:
            self.partly_encoded.add(place)
        for name in row.columns & self.unseen_columns.keys():
            del self.unseen_columns[name]

    def refuse_empty(self, name: str) -> None:
        """Refuse a set without samples.

        Raises:
            DataError: no row gives a sample.
        """
        if not self.samples:
            raise DataError(
                f"{name}: none of {self.rows} rows has anything to learn within {self.length} tokens: "
                f"{self._reasons()}; expected answers that begin before PAD_LEN (--max-padding-length)"
                + (f"; the longest row with one has {self.longest} tokens" if self.longest else "")
            )

    def log(self, name: str, max_dropped_share: float) -> None:
        """Log the counts, and a warning for each kind of row that a user should know of.

        Raises:
            DataError: a larger share of rows than `max_dropped_share` is dropped.
        """
        _logger.info(
            "%s: %d rows, %d %s, %d of %d tokens learned (%.1f %%), %d tokens in the longest row",
            name, self.rows, *self.found, self.learned, self.tokens, 100 * self.learned / self.tokens,
            self.longest,
        )  # fmt: skip
        cut = (
            f"{_CUTS[self.long_samples]} {self.length} tokens, {self.unlearned} of them in an answer; the "
            f"longest row has {self.longest} (PAD_LEN)"
        )
        meaning = "such" if self.allow_special_tokens else "text (--allow-special-tokens)"
        dropped = [(rows, f"dropped: {reason}") for reason, rows in self.dropped.items()]
        for rows, what in (
            (self.cut, cut),
            (self.partly_encoded, "so long that only the part that samples need was encoded and counted"),
            *dropped,
            (self.special, f"with special tokens spelled out in a message, which are encoded as {meaning}"),
        ):
            if rows.count:
                _logger.warning("%s: %d of %d rows %s: %s", name, rows.count, self.rows, what, rows)
        for ours, theirs in self.unseen_columns.items():
            _logger.warning(
                "%s: no row has the key %s of --columns %s=%s; rows were read by their usual keys",
                name, theirs, ours, theirs,
            )  # fmt: skip

        self.refuse_drops(name, max_dropped_share)

    def refuse_drops(self, name: str, most: float) -> None:
        """Refuse a set that loses too many rows.

        Raises:
            DataError: a larger share of rows than `most` is dropped.
        """
        if self.num_dropped > most * self.rows:
            raise DataError(
                f"{name}: {self.num_dropped} of {self.rows} rows ({self.num_dropped / self.rows:.1%}) are "
                f"dropped: {self._reasons()}; expected at most {most:.1%}; {self._cure()}, or allow more",
                field="max_dropped_share",
            )

    def _cure(self) -> str:
        if not self.longest_dropped:
            return "correct the rows"
        other = "" if self.pairs or self.long_samples == "split" else ", or --long-samples split"
        padding = f"{where('max_padding_length')} (and --seq-length, where it is shorter)"
        return f"raise {padding} to {self.longest_dropped}{other}"

    def _reasons(self) -> str:
        return "; ".join(f"{rows.count} {reason}: {rows}" for reason, rows in self.dropped.items())
