"""Data: tokenizer, JSON readers, chat rendering and masks, pre-training sets, sampler; see README.md."""

from patch.data.batches import Batch, BatchReader, Sample, SampleSource
from patch.data.datasets import DataSets, build_datasets
from patch.data.tokenizer import load_tokenizer

__all__ = ["Batch", "BatchReader", "DataSets", "Sample", "SampleSource", "build_datasets", "load_tokenizer"]
