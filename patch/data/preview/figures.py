"""Figures of a set: lengths, drops, duplicates, and what padding and packing make of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from patch.config.data_spec import DataPart
from patch.data.packing import PackingSummary, PairSource, pack
from patch.data.sft.report import Rows, SetReport
from patch.data.sft.source import SftSource


@dataclass(frozen=True, slots=True)
class Figures:
    """The printed figures of a set, of rows or of .bin/.idx."""

    name: str
    """The set as it was named, with its weight."""
    table: list[tuple[str, str]]
    """The figures in words: a name and a value each."""
    values: dict[str, Any]
    """The figures as plain values."""
    report: SetReport | None = None
    """The report on its rows."""


def lengths_text(sizes: np.ndarray, longest: str) -> str:
    """How long samples, documents or conversations are.

    Args:
        sizes: integer [N], tokens of each; not empty.
        longest: what is said of the longest.
    """
    half, most = np.percentile(sizes, (50, 90)).astype(int)
    return f"median {half:,}, 90% have at most {most:,}, {longest}"


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
    duplicates, most_copies = len(source) - len(copies), int(copies.max())
    padded_share = 1 - packing.num_tokens / (packing.num_conversations * capacity)
    used_share = packing.num_tokens / (packing.num_packs * capacity)
    repeated = f"{duplicates:,}; the most frequent sample is there {most_copies:,} times"
    lost = f"; {report.unlearned:,} of them lost learned tokens" if report.unlearned else ""
    table = [
        ("rows", f"{report.rows:,}"),
        (kind, f"{found:,} of at most {capacity:,} tokens"),
        ("tokens", f"{packing.num_tokens:,}"),
        ("learned", f"{packing.num_learned:,} ({packing.num_learned / packing.num_tokens:.1%})"),
        ("length", lengths_text(sizes, f"longest row {report.longest:,}")),
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
        "median": int(np.median(sizes)),
        "padded_share": padded_share,
        "packing": asdict(packing) | {"used_share": used_share, "gain": packing.gain},
    }
    return Figures(name_of(part), table, values, report)


def _hashes(source: SftSource) -> np.ndarray:
    """uint64 [N]: a hash of the tokens of each sample. Of 10 million, two collide with probability 3e-6."""
    conversations = (source.conversation(index)[0] for index in range(len(source)))
    digests = (blake2b(ids.tobytes(), digest_size=8).digest() for ids in conversations)
    return np.fromiter((int.from_bytes(digest) for digest in digests), np.uint64, len(source))


def _places(rows: Rows) -> str:
    return f"{rows.count:,}: {rows}" if rows.count else "none"
