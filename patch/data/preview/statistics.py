"""Figures of a set: lengths, drops, duplicates, and what padding and packing make of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np

from patch.config.data_spec import DataPart
from patch.data.packing import PackingSummary, pack
from patch.data.sft.report import Rows, SetReport
from patch.data.sft.source import SftSource

_MOST_BARS = 12


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many samples have which length."""

    edges: list[int]
    """Tokens [n + 1]: bar i counts the lengths from edges[i] on that are below edges[i + 1]."""
    counts: list[int]
    """Samples [n]."""

    @classmethod
    def of(cls, sizes: np.ndarray) -> Histogram:
        """The histogram of some lengths, with at most 12 bars of a round width.

        Args:
            sizes: integer [N]; not empty.
        """
        longest = int(sizes.max())
        width = next(width for width in _round_numbers() if longest <= width * _MOST_BARS)
        edges = np.append(np.arange(0, longest, width), longest + 1)
        return cls(edges.tolist(), np.histogram(sizes, edges)[0].tolist())


def _round_numbers() -> Iterator[int]:
    """1, 2, 5, 10, 20, 50, ..."""
    power = 1
    while True:
        yield from (power, 2 * power, 5 * power)
        power *= 10


class Figures(Protocol):
    """What is printed and plotted of a set, of rows or of .bin/.idx."""

    @property
    def name(self) -> str:
        """Names the set."""

    @property
    def lengths(self) -> Histogram:
        """How long its samples or documents are."""

    @property
    def counted(self) -> str:
        """What `lengths` counts, in the singular."""

    @property
    def capacity(self) -> int | None:
        """How many tokens fit; None: any number."""

    def table(self) -> list[tuple[str, str]]:
        """The figures in words: a name and a value each."""

    def to_json(self) -> dict[str, Any]:
        """The figures as plain values."""


def name_of(part: DataPart) -> str:
    """A set as it was named, with its weight."""
    return part.path if part.weight is None else f"{part.weight:g} {part.path}"


@dataclass(frozen=True, slots=True)
class SetStatistics:
    """Figures of one set of rows."""

    name: str
    report: SetReport
    """What happened to its rows."""
    duplicates: int
    """Samples with the same tokens as an earlier one."""
    most_copies: int
    """How often the most frequent sample is there."""
    median: int
    """Tokens of a sample."""
    lengths: Histogram
    packing: PackingSummary

    @classmethod
    def of(cls, part: DataPart, source: SftSource, capacity: int) -> SetStatistics:
        """The figures of a set; reads all its tokens.

        Args:
            part: names the set.
            source: the set.
            capacity: tokens of a sample as the model sees it, padding included.
        """
        sizes = np.asarray(source.sizes)
        copies = np.unique_counts(_hashes(source)).counts
        return cls(
            name=name_of(part),
            report=source.report,
            duplicates=len(source) - len(copies),
            most_copies=int(copies.max()),
            median=int(np.median(sizes)),
            lengths=Histogram.of(sizes),
            packing=PackingSummary.of(source, pack(sizes, capacity)),
        )

    @property
    def counted(self) -> str:
        """What `lengths` counts."""
        return "sample"

    @property
    def capacity(self) -> int:
        """Tokens of a sample as the model sees it."""
        return self.packing.capacity

    @property
    def padded_share(self) -> float:
        """The share of padding, one conversation a sample."""
        packing = self.packing
        return 1 - packing.num_tokens / (packing.num_conversations * packing.capacity)

    @property
    def packed_share(self) -> float:
        """The share of the packs' slots that hold tokens of the data."""
        return self.packing.num_tokens / (self.packing.num_packs * self.packing.capacity)

    def table(self) -> list[tuple[str, str]]:
        """The figures in words: a name and a value each."""
        report, packing = self.report, self.packing
        return [
            ("rows", f"{report.rows:,}"),
            ("samples", f"{report.samples:,} of at most {packing.capacity:,} tokens"),
            ("tokens", f"{packing.num_tokens:,}"),
            ("learned", f"{packing.num_learned:,} ({packing.num_learned / packing.num_tokens:.1%})"),
            ("length", f"median {self.median:,}, longest row {report.longest:,}"),
            *_dropped(report),
            ("too long, cut", _cut(report)),
            ("special tokens in text", _places(report.special)),
            ("duplicates", _times(self.duplicates, self.most_copies)),
            ("padding, unpacked", f"{self.padded_share:.1%} of all slots"),
            (
                "packed",
                f"{packing.num_packs:,} sequences, {self.packed_share:.1%} of all slots used; "
                f"a step holds {packing.gain:.2f} times as much",
            ),
        ]

    def to_json(self) -> dict[str, Any]:
        """The figures as plain values."""
        return {
            "name": self.name,
            "report": self.report.to_json(),
            "duplicates": self.duplicates,
            "most_copies": self.most_copies,
            "median": self.median,
            "lengths": asdict(self.lengths),
            "padded_share": self.padded_share,
            "packing": asdict(self.packing) | {"used_share": self.packed_share, "gain": self.packing.gain},
        }


def _hashes(source: SftSource) -> np.ndarray:
    """uint64 [N]: a hash of the tokens of each sample. Of 10 million, two collide with probability 3e-6."""
    conversations = (source.conversation(index)[0] for index in range(len(source)))
    digests = (blake2b(ids.tobytes(), digest_size=8).digest() for ids in conversations)
    return np.fromiter((int.from_bytes(digest) for digest in digests), np.uint64, len(source))


def _dropped(report: SetReport) -> list[tuple[str, str]]:
    if not report.dropped:
        return [("dropped", "none")]
    return [(f"dropped: {reason}", _places(rows)) for reason, rows in report.dropped.items()]


def _cut(report: SetReport) -> str:
    lost = f"; {report.unlearned:,} of them lost learned tokens" if report.unlearned else ""
    return f"{_places(report.cut)}{lost}"


def _places(rows: Rows) -> str:
    return f"{rows.count:,}: {rows}" if rows.count else "none"


def _times(duplicates: int, most: int) -> str:
    return f"{duplicates:,}; the most frequent sample is there {most:,} times" if duplicates else "none"
