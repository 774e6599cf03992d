"""The rules of what a run reads, and of its length in samples and steps: batches, warm-up, what is saved.

The length of pre-training is a number of samples (position 23 counts tokens), and so is that of
`--train-epochs`; other fine-tuning has a number of steps. The two differ once the global batch size was
changed on a resume.
"""

from __future__ import annotations

import dataclasses
import math
import re
from fractions import Fraction

from patch.config.data_spec import parse_columns, parse_template_kwargs, split_shares
from patch.config.fields import FIELDS, scalar_of, value_of
from patch.config.positions import length_text, refuse, where
from patch.config.schema import RunConfig
from patch.device import MachineFacts
from patch.numbers import to_int

_SHORTEST_PAIR = 4
"""Tokens of a row for a pair."""


def columns_are_pairs(config: RunConfig, machine: MachineFacts) -> None:
    """The map of columns and the variables of the chat template can be read, and columns are known."""
    parse_columns(config.data.columns)
    parse_template_kwargs(config.data.chat_template_kwargs)


def pretraining_reads_indexed_sets(config: RunConfig, machine: MachineFacts) -> None:
    """Pre-training reads .bin/.idx, SFT also raw rows."""
    if not config.training.sft and config.data.dataset_type == "raw":
        why = "pre-training reads .bin/.idx, which llama-patch preprocess makes from rows"
        refuse("dataset_type", "raw", "idxmap, or SFT=true", why)


def objective_is_of_its_kind(config: RunConfig, machine: MachineFacts) -> None:
    """A built-in objective is that of the run's data."""
    name, kind = config.training.objective, "sft" if config.training.sft else "pretrain"
    if name in ("sft", "pretrain") and name != kind:
        refuse("objective", name, kind, f"SFT={str(config.training.sft).lower()} says what is read")
    if name == "dpo" and kind == "pretrain":
        refuse("objective", name, "SFT=true", "preferences are about answers, pre-training reads documents")


def pairs_are_rows(config: RunConfig, machine: MachineFacts) -> None:
    """Pairs are read from rows and stay whole; what is said about them has pairs."""
    training, data = config.training, config.data
    if training.objective != "dpo":
        for field in ("dpo_beta", "dpo_loss_type", "dpo_sft_weight"):
            if value_of(config, field) != FIELDS[field].default:
                refuse(field, value_of(config, field), "--objective dpo too", "only pairs have such a loss")
        return
    if data.dataset_type != "raw":
        why = "--objective dpo reads rows with chosen and rejected; .bin/.idx have no pairs"
        refuse("dataset_type", data.dataset_type, "raw", why)
    if data.long_samples == "split":
        why = "of a pair that is divided no part could be compared"
        refuse("long_samples", "split", "cut-end, cut-begin or drop", why)
    if data.max_padding_length < _SHORTEST_PAIR:
        why = "both sequences of a pair lie in one row, each with a question and an answer"
        refuse("max_padding_length", data.max_padding_length, f"at least {_SHORTEST_PAIR}", why)


def documents_are_pretraining(config: RunConfig, machine: MachineFacts) -> None:
    """Check that the flags of documents fit together and are set in pre-training only."""
    data = config.data
    for field in ("split", "reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        if config.training.sft and value_of(config, field):
            why = "it is about the documents of a pre-training set"
            refuse(field, str(scalar_of(config, field)).lower(), "none or false, or SFT=false", why)
    if data.reset_position_ids and not data.reset_attention_mask:
        why = "positions that begin again while attention goes on are not built; RoPE knows distances only"
        refuse("reset_position_ids", "true", "false, or --reset-attention-mask too", why)
    if data.split is None:
        return
    _, validation, _ = split_shares(data.split)
    if validation and data.valid_data_path is not None:
        why = "the split names the validation documents already"
        refuse("valid_data_path", data.valid_data_path, "none, or a --split without a second share", why)


def tasks_are_asked_for(config: RunConfig, machine: MachineFacts) -> None:
    """Check that flags of tasks have tasks, code has a folder, and the best checkpoint has scores."""
    data, best, every = config.data, config.checkpoint.metric_for_best_model, config.checkpoint.save_interval
    for field in FIELDS if data.eval_tasks is None else ():
        is_of_tasks = field.startswith("eval_tasks_") or field == "metric_for_best_model"
        if is_of_tasks and value_of(config, field) != FIELDS[field].default:
            refuse(field, str(scalar_of(config, field)), "--eval-tasks too", "no task is named")
    if data.eval_tasks_allow_code and data.eval_tasks_path is None:
        refuse("eval_tasks_allow_code", "true", "--eval-tasks-path too", "its code is meant")
    if not (data.eval_tasks_fewshot_as_multiturn or data.eval_tasks_apply_chat_template):
        refuse("eval_tasks_fewshot_as_multiturn", "false", "--eval-tasks-apply-chat-template", "no chat")
    if best is None:
        return
    if "/" not in best:
        refuse("metric_for_best_model", best, "valid_loss or TASK/METRIC, such as cmmlu/acc", "it is neither")
    interval = data.eval_tasks_interval or 0
    if not interval or (every % interval and interval % every):
        why = f"checkpoints of every {every} steps ({where('save_interval')}) need scores of the same step"
        refuse("eval_tasks_interval", interval, f"{every}, a multiple or a divisor of it", why)


def packing_has_conversations(config: RunConfig, machine: MachineFacts) -> None:
    """Conversations are packed; a pre-training sequence is full already."""
    if config.data.packing and not config.training.sft:
        why = "sequences of pre-training are full; --reset-attention-mask keeps their documents apart"
        refuse("packing", "true", "false, or SFT=true", why)


def global_batch_divides(config: RunConfig, machine: MachineFacts) -> None:
    """Every replica computes the same number of whole micro-batches."""
    batch, micro = config.training.global_batch_size, config.training.micro_batch_size
    unit = micro * config.data_parallel_size
    if batch % unit:
        below = batch // unit * unit
        near = f"{below} or {below + unit}" if below else str(unit)
        why = f"BATCH_SIZE {micro} x {config.data_parallel_size} data-parallel replicas"
        refuse("global_batch_size", batch, f"a multiple of {unit} such as {near}", why)


def run_has_steps(config: RunConfig, machine: MachineFacts) -> None:
    """The run has at least one step, or a number of epochs."""
    training = config.training
    if training.train_iters < 1 and training.train_epochs is None:
        refuse("train_iters", training.train_iters, "at least 1, or --train-epochs", "steps of the run")


def retained_are_saved(config: RunConfig, machine: MachineFacts) -> None:
    """The checkpoints that are to stay are saved at all."""
    every, interval = config.checkpoint.save_retain_every, config.checkpoint.save_interval
    if every and every % interval:
        why = "a checkpoint stays only if it is saved"
        refuse("save_retain_every", every, f"a multiple of {where('save_interval')} {interval}", why)


def warmup_fits(config: RunConfig) -> None:
    """The warm-up is shorter than the run, whose steps are known."""
    warmup, iters = config.optimizer.lr_warmup_iters, config.training.train_iters
    if warmup >= iters:
        got, expected = length_text(config, warmup), length_text(config, iters)
        refuse("lr_warmup_iters", got, f"less than the run's {expected}", "the warm-up is part of the run")


def schedule_fits(config: RunConfig, machine: MachineFacts) -> None:
    """The warm-up ends within the run, and the last learning rate is not above the highest one."""
    optimizer = config.optimizer
    if config.training.train_epochs is None:
        warmup_fits(config)
    if optimizer.min_lr > optimizer.lr:
        refuse("min_lr", optimizer.min_lr, f"at most LR {optimizer.lr}", "the cosine ends below its top")
    decoupled, decoupled_min = optimizer.decoupled_lr, optimizer.decoupled_min_lr
    if decoupled is None:
        if decoupled_min is not None:
            refuse("decoupled_min_lr", decoupled_min, "none", "it goes with --decoupled-lr, which is none")
    elif decoupled < (optimizer.min_lr if decoupled_min is None else decoupled_min):
        expected = "at least --decoupled-min-lr, or without it --min-lr"
        refuse("decoupled_lr", decoupled, expected, "the cosine ends below its top")


def profiled_steps(text: str | None) -> range | None:
    """The steps of START:END, both included and counted from 1; None: the text names none.

    Args:
        text: the value of --profile.
    """
    found = re.fullmatch(r"(\d+):(\d+)", text or "")
    first, last = (to_int(found[1]), to_int(found[2])) if found else (0, 0)
    return range(first, last + 1) if first and last and first <= last else None


def profile_names_steps(config: RunConfig, machine: MachineFacts) -> None:
    """--profile is START:END."""
    text = config.checkpoint.profile
    if text is not None and profiled_steps(text) is None:
        refuse("profile", text, "START:END, such as 10:12", "the first and the last step of the trace")


def is_counted_in_samples(config: RunConfig) -> bool:
    """Whether the run's length is fixed in samples: another global batch size changes its number of steps."""
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
