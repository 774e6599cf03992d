"""Figures of a set: lengths, drops, duplicates, and what padding and packing make of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from patch.config.data_spec import DataPart
from patch.data.packing import PackingSummary, PairSource, pack
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

    def bars(self) -> list[tuple[int, int, int]]:
        """First length, last length and count of each range that has a sample."""
        ranges = zip(self.edges, self.edges[1:], self.counts, strict=False)
        return [(first, end - 1, count) for first, end, count in ranges if count]


def _round_numbers() -> Iterator[int]:
    """1, 2, 5, 10, 20, 50, ..."""
    power = 1
    while True:
        yield from (power, 2 * power, 5 * power)
        power *= 10


@dataclass(frozen=True, slots=True)
class Figures:
    """What is printed of a set, of rows or of .bin/.idx."""

    name: str
    """The set as it was named, with its weight."""
    table: list[tuple[str, str]]
    """The figures in words: a name and a value each."""
    lengths: Histogram
    """How long its samples, documents or conversations are."""
    counted: str
    """Which of them `lengths` counts, in the singular."""
    values: dict[str, Any]
    """The figures as plain values."""
    report: SetReport | None = None
    """What happened to its rows."""


def name_of(part: DataPart) -> str:
    """A set as it was named, with its weight."""
    return part.path if part.weight is None else f"{part.weight:g} {part.path}"


def figures_of_rows(part: DataPart, source: SftSource, capacity: int) -> Figures:
    """The figures of a set of rows; reads all its tokens.

    Args:
        part: names the set.
        source: the set.
        capacity: tokens of a sample as the model sees it, padding included.
    """
    sizes, report = np.asarray(source.sizes), source.report
    if report.pairs:
        pairs = PairSource(source, capacity, is_packed=True)
        sizes, packing = pairs.sizes, PackingSummary.of(pairs, pairs.packs)
    else:
        packing = PackingSummary.of(source, pack(sizes, capacity))
    found, kind = report.found
    copies = np.unique_counts(_hashes(source)).counts
    duplicates, most_copies, median = len(source) - len(copies), int(copies.max()), int(np.median(sizes))
    padded_share = 1 - packing.num_tokens / (packing.num_conversations * capacity)
    used_share = packing.num_tokens / (packing.num_packs * capacity)
    lengths = Histogram.of(sizes)
    repeated = f"{duplicates:,}; the most frequent sample is there {most_copies:,} times"
    lost = f"; {report.unlearned:,} of them lost learned tokens" if report.unlearned else ""
    table = [
        ("rows", f"{report.rows:,}"),
        (kind, f"{found:,} of at most {capacity:,} tokens"),
        ("tokens", f"{packing.num_tokens:,}"),
        ("learned", f"{packing.num_learned:,} ({packing.num_learned / packing.num_tokens:.1%})"),
        ("length", f"median {median:,}, longest row {report.longest:,}"),
        *[(f"dropped: {reason}", _places(rows)) for reason, rows in report.dropped.items()],
        *([] if report.dropped else [("dropped", "none")]),
        ("too long, cut", f"{_places(report.cut)}{lost}"),
        ("special tokens in text", _places(report.special)),
        ("duplicates", repeated if duplicates else "none"),
        ("padding, unpacked", f"{padded_share:.1%} of all slots"),
        (
            "packed",
            f"{packing.num_packs:,} sequences, {used_share:.1%} of all slots used; "
            f"a step holds {packing.gain:.2f} times as much",
        ),
    ]
    values = {
        "name": name_of(part),
        "report": report.to_json(),
        "duplicates": duplicates,
        "most_copies": most_copies,
        "median": median,
        "lengths": asdict(lengths),
        "padded_share": padded_share,
        "packing": asdict(packing) | {"used_share": used_share, "gain": packing.gain},
    }
    return Figures(name_of(part), table, lengths, kind[:-1], values, report)


def _hashes(source: SftSource) -> np.ndarray:
    """uint64 [N]: a hash of the tokens of each sample. Of 10 million, two collide with probability 3e-6."""
    conversations = (source.conversation(index)[0] for index in range(len(source)))
    digests = (blake2b(ids.tobytes(), digest_size=8).digest() for ids in conversations)
    return np.fromiter((int.from_bytes(digest) for digest in digests), np.uint64, len(source))


def _places(rows: Rows) -> str:
    return f"{rows.count:,}: {rows}" if rows.count else "none"
