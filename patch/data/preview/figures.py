"""Figures of a data set: lengths, dropped rows, duplicates, and the effect of padding and packing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from patch.config.data_spec import DataPart
from patch.data.packing import SOURCES, PackingSummary
from patch.data.sft.report import Rows, SetReport
from patch.data.sft.source import SftSource


@dataclass(frozen=True, slots=True)
class Figures:
    """Printed figures of a data set, of rows or of .bin/.idx."""

    name: str
    """Name of the set as the user gave it, with its weight."""
    table: list[tuple[str, str]]
    """Name and value of each figure, in words."""
    values: dict[str, Any]
    report: SetReport | None = None
    """Report on the rows, or None for .bin/.idx."""


def format_lengths(sizes: np.ndarray, longest: str) -> str:
    """Return a text about the lengths in tokens, integer [N], N > 0; `longest` is text about the longest."""
    half, most = np.percentile(sizes, (50, 90)).astype(int)
    return f"median {half:,}, 90% have at most {most:,}, {longest}"


def name_of(part: DataPart) -> str:
    """Return the name of a set as the user gave it, with its weight."""
    return part.path if part.weight is None else f"{part.weight:g} {part.path}"


def figures_of_rows(part: DataPart, source: SftSource, capacity: int) -> Figures:
    """Return the figures of a set of rows. Reads all tokens. `capacity` is a sample's tokens with padding."""
    report = source.report
    packed = SOURCES["pair" if report.pairs else "conversation"](source, capacity, is_packed=True)
    sizes, packing = packed.sizes, PackingSummary.of(packed)
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
        ("length", format_lengths(sizes, f"longest row {report.longest:,}")),
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
        "report": report.to_json(),
        "duplicates": duplicates,
        "most_copies": most_copies,
        "median": int(np.median(sizes)),
        "padded_share": padded_share,
        "packing": asdict(packing) | {"used_share": used_share, "gain": packing.gain},
    }
    return Figures(name_of(part), table, values, report)


def _hashes(source: SftSource) -> np.ndarray:
    """Return a hash of each sample's tokens, uint64 [N]. Among 10 million, two collide with chance 3e-6."""
    conversations = (source.conversation(index)[0] for index in range(len(source)))
    digests = (blake2b(ids.tobytes(), digest_size=8).digest() for ids in conversations)
    return np.fromiter((int.from_bytes(digest) for digest in digests), np.uint64, len(source))


def _places(rows: Rows) -> str:
    return f"{rows.count:,}: {rows}" if rows.count else "none"
