"""The length of a run in samples and steps; of one in epochs, once the training set has been read."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

from patch.config.rules import warmup_fits
from patch.config.schema import RunConfig


def num_train_samples(config: RunConfig, one_pass: int, *, ahead: int = 0) -> int:
    """How many samples the run takes: whole global batches, and those it is ahead.

    A run of `--train-epochs` takes each sample at least so often: where the last global batch goes beyond
    the last epoch, it is filled with the first samples of the next one.

    Args:
        config: the run.
        one_pass: samples of one pass over the training set.
        ahead: samples that were consumed beyond one global batch a step; negative if they were fewer. It is 0
            unless the global batch size was changed on a resume.
    """
    training = config.training
    if training.train_epochs is None:
        return training.train_iters * training.global_batch_size + ahead
    # The decimal number that was written counts: 0.1 of 1000 samples are 100, not 100.00000000000001.
    samples = Fraction(repr(training.train_epochs)) * one_pass
    size = training.global_batch_size
    return math.ceil((samples - ahead) / size) * size + ahead


def with_samples(config: RunConfig, num_samples: int, *, ahead: int = 0) -> RunConfig:
    """The run with the steps that take so many samples; `train_epochs` stays, and gives the same steps again.

    Args:
        config: the run.
        num_samples: what `num_train_samples` returned.
        ahead: as given to it.

    Raises:
        ConfigError: the warm-up is not shorter than the run.
    """
    steps = (num_samples - ahead) // config.training.global_batch_size
    resolved = dataclasses.replace(config, training=dataclasses.replace(config.training, train_iters=steps))
    warmup_fits(resolved)
    return resolved
