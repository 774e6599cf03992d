"""The length of a run whose epochs are given: its steps follow once the training set has been read."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

from patch.config.rules import warmup_fits
from patch.config.schema import RunConfig


def num_train_samples(config: RunConfig, one_pass: int) -> int:
    """How many samples the run takes: whole global batches.

    A run of `--train-epochs` takes each sample at least so often: where the last global batch goes beyond
    the last epoch, it is filled with the first samples of the next one.

    Args:
        config: the run.
        one_pass: samples of one pass over the training set.
    """
    training = config.training
    if training.train_epochs is None:
        return training.train_iters * training.global_batch_size
    # The decimal number that was written counts: 0.1 of 1000 samples are 100, not 100.00000000000001.
    samples = Fraction(repr(training.train_epochs)) * one_pass
    return math.ceil(samples / training.global_batch_size) * training.global_batch_size


def with_samples(config: RunConfig, num_samples: int) -> RunConfig:
    """The run with the steps that take so many samples; `train_epochs` stays, and gives the same steps again.

    Args:
        config: the run.
        num_samples: what `num_train_samples` returned.

    Raises:
        ConfigError: the warm-up is not shorter than the run.
    """
    steps = num_samples // config.training.global_batch_size
    resolved = dataclasses.replace(config, training=dataclasses.replace(config.training, train_iters=steps))
    warmup_fits(resolved)
    return resolved
