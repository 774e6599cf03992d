"""The length of a run in samples and steps; of one in epochs, once the training set has been read.

The length of pre-training is a number of samples (position 23 counts tokens), and so is that of
`--train-epochs`; other fine-tuning has a number of steps. The two differ once the global batch size was
changed on a resume.
"""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

from patch.config.rules import warmup_fits
from patch.config.schema import RunConfig


def is_counted_in_samples(config: RunConfig) -> bool:
    """Whether another global batch size changes the number of steps, and not that of the samples."""
    return not config.training.sft or config.training.train_epochs is not None


def num_train_samples(config: RunConfig, one_pass: int, *, ahead: int = 0) -> int:
    """How many samples the run takes: whole global batches, and those it is ahead.

    A run of `--train-epochs` takes each sample at least so often: where the last global batch goes beyond
    the last epoch, it is filled with the first samples of the next one. Pre-training takes `train_iters`
    batches of the present size, whatever sizes it had before.

    Args:
        config: the run.
        one_pass: samples of one pass over the training set.
        ahead: samples that were consumed beyond one global batch a step; negative if they were fewer. It is 0
            unless the global batch size was changed on a resume.
    """
    training, size = config.training, config.training.global_batch_size
    if not is_counted_in_samples(config):
        return training.train_iters * size + ahead
    samples = Fraction(training.train_iters * size)
    if training.train_epochs is not None:
        # The decimal number that was written counts: 0.1 of 1000 samples are 100, not 100.00000000000001.
        samples = Fraction(repr(training.train_epochs)) * one_pass
    return math.ceil((samples - ahead) / size) * size + ahead


def with_samples(config: RunConfig, num_samples: int, *, ahead: int = 0) -> RunConfig:
    """The run with the steps that take so many samples.

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


def place_in_schedule(config: RunConfig, iteration: int, *, ahead: int = 0) -> tuple[float, float]:
    """How far a run is after a step, and its length, in steps of the present global batch size.

    Args:
        config: the run, with its steps.
        iteration: of the step, counted from 0.
        ahead: as given to `num_train_samples`.
    """
    offset = ahead / config.training.global_batch_size if is_counted_in_samples(config) else 0
    return iteration + 1 + offset, config.training.train_iters + offset
