"""Data: tokenizer, JSON readers, chat rendering and masks, pre-training sets, batches; see README.md.

`load_sft` reads chat rows with the tokenizer of `load_tokenizer`. It returns a torch Dataset of `Sample`s,
for a DataLoader (with `collate`) or for `BatchReader`, which gives each data-parallel rank its `Batch`es. A
`SampleSource` is any object with samples by index; `build_datasets` builds the `DataSets` of a run.

The names exported here do not need megatron-core. Pre-training sets do, so they are imported from their own
package: `pretraining.dataset.load_training` reads sets, `pretraining.preprocess.write_indexed` writes them.
"""

from patch.data.datasets import DataSets, build_datasets
from patch.data.order import BatchReader
from patch.data.samples import Batch, Sample, SampleSource, collate
from patch.data.sft.source import load_sft
from patch.data.tokenizer import load_tokenizer

__all__ = [
    "Batch",
    "BatchReader",
    "DataSets",
    "Sample",
    "SampleSource",
    "build_datasets",
    "collate",
    "load_sft",
    "load_tokenizer",
]
