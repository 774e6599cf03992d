"""Data: tokenizer, JSON readers, chat rendering and masks, pre-training sets, batches; see README.md.

`load_sft` reads chat rows with the tokenizer of `load_tokenizer`. It returns a torch Dataset of `Sample`s for
a DataLoader (with `collate`) or for `BatchReader`, which gives each data-parallel rank its `Batch`es. A
`SampleSource` is any object with samples by index. `build_datasets` builds the `DataSets` of a run.

The names exported here do not need megatron-core. Pre-training sets do, so import them from their own
package: `pretraining.dataset.load_training` reads sets, `pretraining.preprocess.write_indexed` writes them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from patch.data.datasets import DataSets, build_datasets
    from patch.data.order import BatchReader
    from patch.data.samples import Batch, Sample, SampleSource, collate
    from patch.data.sft.source import load_sft
    from patch.data.tokenizer import load_tokenizer

_HOMES = {
    **dict.fromkeys(("DataSets", "build_datasets"), "datasets"),
    **dict.fromkeys(("Batch", "Sample", "SampleSource", "collate"), "samples"),
    **{"BatchReader": "order", "load_sft": "sft.source", "load_tokenizer": "tokenizer"},
}


def __getattr__(name: str) -> Any:
    """Import the module of an exported name on first use, so that rows can be read without torch."""
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Batch", "BatchReader", "DataSets", "Sample", "SampleSource", "build_datasets", "collate", "load_sft",
    "load_tokenizer",
]  # fmt: skip
