"""Rules of a run's data, and of its length in samples and steps: batches, warm-up, saved checkpoints.

The length of pre-training and of `--train-epochs` is a number of samples (position 23 counts tokens). Other
fine-tuning has a number of steps. The two differ if a resume has changed the global batch size.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from patch.config.choices import ROW_KINDS
from patch.config.data_spec import parse_columns, parse_template_kwargs, split_shares
from patch.config.fields import with_values
from patch.config.positions import length_text, refuse, where
from patch.config.schema import RunConfig
from patch.device import MachineFacts
from patch.text import to_int

_SHORTEST_PAIR = 4
"""Fewest tokens of a row for a pair."""


def columns_are_pairs(config: RunConfig, machine: MachineFacts) -> None:
    """Require readable --columns with known names, and readable --chat-template-kwargs."""
    parse_columns(config.data.columns)
    parse_template_kwargs(config.data.chat_template_kwargs)


def objective_is_of_its_kind(config: RunConfig, machine: MachineFacts) -> None:
    """Require a built-in objective to match the kind of the run, pre-training or SFT."""
    name, kind = config.training.objective, "sft" if config.training.sft else "pretrain"
    if name in ("sft", "pretrain") and name != kind:
        refuse("objective", name, kind, f"SFT={str(config.training.sft).lower()} says what is read")
    if name in ROW_KINDS and kind == "pretrain":
        refuse("objective", name, "SFT=true", "preferences are about answers, pre-training reads documents")


def pairs_are_rows(config: RunConfig, machine: MachineFacts) -> None:
    """Require raw, undivided rows for preferences."""
    data, kind = config.data, config.row_kind
    if kind == "conversation":
        return
    if data.dataset_type != "raw":
        keys = "chosen and rejected" if kind == "pair" else "prompt, completion and label"
        why = f"--objective {config.training.objective} reads rows with {keys}; .bin/.idx have none"
        refuse("dataset_type", data.dataset_type, "raw", why)
    if data.long_samples == "split":
        why = "of an answer that is divided no part could be compared"
        refuse("long_samples", "split", "cut-end, cut-begin or drop", why)
    if kind == "pair" and data.max_padding_length < _SHORTEST_PAIR:
        why = "both sequences of a pair lie in one row, each with a question and an answer"
        refuse("max_padding_length", data.max_padding_length, f"at least {_SHORTEST_PAIR}", why)


def validation_is_named_once(config: RunConfig, machine: MachineFacts) -> None:
    """Refuse validation documents of a split beside a validation set."""
    data = config.data
    if data.split is None:
        return
    _, validation, _ = split_shares(data.split)
    if validation and data.valid_data_path is not None:
        why = "the split names the validation documents already"
        refuse("valid_data_path", data.valid_data_path, "none, or a --split without a second share", why)


def best_checkpoint_has_scores(config: RunConfig, machine: MachineFacts) -> None:
    """Check that the best checkpoint has scores."""
    data, best, every = config.data, config.checkpoint.metric_for_best_model, config.checkpoint.save_interval
    if best is None:
        return
    if "/" not in best:
        refuse("metric_for_best_model", best, "valid_loss or TASK/METRIC, such as cmmlu/acc", "it is neither")
    interval = data.eval_tasks_interval or 0
    if not interval or (every % interval and interval % every):
        why = f"checkpoints of every {every} steps ({where('save_interval')}) need scores of the same step"
        refuse("eval_tasks_interval", interval, f"{every}, a multiple or a divisor of it", why)


def global_batch_divides(config: RunConfig, machine: MachineFacts) -> None:
    """Require the same number of whole micro-batches on every replica."""
    batch, micro = config.training.global_batch_size, config.training.micro_batch_size
    unit = micro * config.data_parallel_size
    if batch % unit:
        below = batch // unit * unit
        near = f"{below} or {below + unit}" if below else str(unit)
        why = f"BATCH_SIZE {micro} x {config.data_parallel_size} data-parallel replicas"
        refuse("global_batch_size", batch, f"a multiple of {unit} such as {near}", why)


def run_has_steps(config: RunConfig, machine: MachineFacts) -> None:
    """Require at least one step, or a number of epochs."""
    training = config.training
    if training.train_iters < 1 and training.train_epochs is None:
        refuse("train_iters", training.train_iters, "at least 1, or --train-epochs", "steps of the run")


def retained_are_saved(config: RunConfig, machine: MachineFacts) -> None:
    """Require --save-retain-every to be a multiple of --save-interval."""
    every, interval = config.checkpoint.save_retain_every, config.checkpoint.save_interval
    if every and every % interval:
        why = "a checkpoint stays only if it is saved"
        refuse("save_retain_every", every, f"a multiple of {where('save_interval')} {interval}", why)


def warmup_fits(config: RunConfig) -> None:
    """Require a warm-up, and a decay after it, that fit into the run, whose steps must be known."""
    optimizer, iters = config.optimizer, config.training.train_iters
    warmup, end = optimizer.lr_warmup_iters, optimizer.lr_decay_iters or iters
    if warmup >= iters:
        got, expected = length_text(config, warmup), length_text(config, iters)
        refuse("lr_warmup_iters", got, f"less than the run's {expected}", "the warm-up is part of the run")
    if warmup >= end:
        refuse("lr_decay_iters", end, f"more than the {warmup} of warm-up", "the decay begins after it")
    if optimizer.lr_decay_style == "WSD" and not 0 < (optimizer.lr_wsd_decay_iters or 0) <= end - warmup:
        why = "--lr-decay-style WSD decays in the last of the steps after warm-up"
        refuse("lr_wsd_decay_iters", optimizer.lr_wsd_decay_iters or 0, f"1 to {end - warmup}", why)


def schedule_fits(config: RunConfig, machine: MachineFacts) -> None:
    """Require warm-up and decay within the run, and first and final learning rates below the highest."""
    optimizer = config.optimizer
    if config.training.train_epochs is None:
        warmup_fits(config)
    if optimizer.min_lr > optimizer.lr:
        refuse("min_lr", optimizer.min_lr, f"at most LR {optimizer.lr}", "the rate never rises after its top")
    if optimizer.lr_warmup_init > optimizer.lr:
        refuse("lr_warmup_init", optimizer.lr_warmup_init, f"at most LR {optimizer.lr}", "the warm-up rises")
    decoupled, decoupled_min = optimizer.decoupled_lr, optimizer.decoupled_min_lr
    if decoupled is not None and decoupled < (optimizer.min_lr if decoupled_min is None else decoupled_min):
        expected = "at least --decoupled-min-lr, or without it --min-lr"
        refuse("decoupled_lr", decoupled, expected, "the rate never rises after its top")


def profiled_steps(text: str | None) -> range | None:
    """Return the steps of --profile START:END, inclusive and counted from 1, or None if it is malformed."""
    found = re.fullmatch(r"(\d+):(\d+)", text or "")
    first, last = (to_int(found[1]), to_int(found[2])) if found else (0, 0)
    return range(first, last + 1) if first and last and first <= last else None


def profile_names_steps(config: RunConfig, machine: MachineFacts) -> None:
    """Require --profile to be START:END."""
    text = config.checkpoint.profile
    if text is not None and profiled_steps(text) is None:
        refuse("profile", text, "START:END, such as 10:12", "the first and the last step of the trace")


def is_counted_in_samples(config: RunConfig) -> bool:
    """Return whether the run's length is a number of samples, so that the global batch decides its steps."""
    return not config.training.sft or config.training.train_epochs is not None


def num_train_samples(config: RunConfig, one_pass: int, *, ahead: int = 0) -> int:
    """Return how many samples the run takes: whole global batches, plus the samples that the run is ahead.

    A run of `--train-epochs` takes each sample at least that often. If the last global batch exceeds the last
    epoch, it is filled with the first samples of the next epoch. Pre-training takes `train_iters` batches of
    the present size, whatever sizes it had before.

    Args:
        one_pass: samples of one pass over the training set.
        ahead: consumed samples minus one global batch per step; may be negative. It is 0 unless a resume has
            changed the global batch size.
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
    """Return the run with the steps that take `num_samples` samples; arguments as in `num_train_samples`.

    Raises:
        ConfigError: the warm-up is not shorter than the run.
    """
    steps = (num_samples - ahead) // config.training.global_batch_size
    resolved = with_values(config, train_iters=steps)
    warmup_fits(resolved)
    return resolved


def place_in_schedule(config: RunConfig, iteration: int, *, ahead: int = 0) -> tuple[float, float]:
    """Return the run's progress after a step, and its length, in steps of the present global batch size.

    `iteration` counts from 0; `ahead` is that of `num_train_samples`.
    """
    offset = ahead / config.training.global_batch_size if is_counted_in_samples(config) else 0
    return iteration + 1 + offset, config.training.train_iters + offset
