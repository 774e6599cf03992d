"""Sets in .bin/.idx, written by upstream's builder."""

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder


def write_set(prefix: str | Path, documents: Iterable[Sequence[int]], dtype: type = np.int32) -> str:
    """Write documents of one sequence each; return the path of the files without suffixes."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for ids in documents:
        builder.add_document(np.array(ids, np.int64).astype(dtype), [len(ids)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def consecutive(sizes: Iterable[int], first: int = 1) -> list[range]:
    """Return documents of consecutive numbers, so that a sample shows where it comes from."""
    return [range(start, end) for start, end in pairwise(accumulate(sizes, initial=first))]
