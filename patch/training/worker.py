"""One worker process of a run, from joining the job to the exported model."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch.distributed as dist

from patch import compat
from patch.checks.run_length import profiled_steps
from patch.config import to_yaml
from patch.config.fields import FIELDS, scalar_of
from patch.config.schema import RunConfig
from patch.convert import export_hf
from patch.device import DeviceContext
from patch.distributed.collectives import (
    all_gather_object,
    all_or_none,
    fail_together,
    from_rank_0,
    on_all_ranks,
)
from patch.distributed.groups import initialize, shutdown
from patch.errors import CheckpointError, ConfigError
from patch.launch.worker_process import WorkerExit, announce_end, failure
from patch.logger import configure_logging, get_logger
from patch.optimizer.kernels import try_kernel
from patch.preflight.checkpoint_places import checkpoint_root
from patch.preflight.model_of_folder import has_hf_config
from patch.preflight.resume_guard import check_tokens, remember_data
from patch.storage.atomic import write_record
from patch.storage.lock import hold_run
from patch.storage.names import CONFIG_FILE, HF_FOLDER, METRICS_FILE
from patch.storage.places import AnyPath
from patch.storage.remote import RemotePath
from patch.training import HOOKS
from patch.training.guards.error_translation import translate_errors
from patch.training.guards.hang_guard import guarding
from patch.training.guards.phases import PhaseClock
from patch.training.hooks.checkpoint_retention import LOWEST_LOSS, CheckpointRetention, Measure, Retention
from patch.training.hooks.hook import LastSaved, ProgressDisplay, RateWarning, StepProfile, TrainerHook
from patch.training.hooks.metrics import LossPlot, MetricsLog
from patch.training.hooks.reporting import Reporter
from patch.training.hooks.store_records import StoreMetrics, send_records, take_metrics, take_records
from patch.training.saving import write_adapters
from patch.training.setup import Run, build_run
from patch.training.tasks.suite import TaskScores
from patch.training.trainer import Trainer

_logger = get_logger(__name__)

_PER_MACHINE_FIELDS = frozenset(
    "train_data_path valid_data_path chat_template cache_dir data_workers save stop_file "
    "optimizer_offload_policy optimizer_offload_fraction optimizer_offload_auto_threshold "
    "optimizer_offload_chunk_size optimizer_offload_streamed offload_folder optimizer_offload_host_share "
    "simulated_device_memory".split()
)
"""Fields beside paths that may differ between machines: data, and the placement of optimizer states."""


def run(config: RunConfig) -> None:
    """Run the worker of the rank that RANK, LOCAL_RANK and WORLD_SIZE describe.

    A worker that `launch` has started must end within END_S seconds after this function.

    Raises:
        PatchError: an error that the user can cure; its exit_code is the exit code of the worker.
        SystemExit: a stop request ended the run, with a checkpoint (see `stop`); the code is that of the
            request. Under our launcher, `run` returns instead: the launcher reads the code in the error file.
    """
    configure_logging()
    try:
        with translate_errors(config):
            exit_code = _train(config)
    except Exception as error:
        announce_end(failure(error))
        raise
    if exit_code:
        sys.exit(exit_code)


def _train(config: RunConfig) -> int:
    local_rank = int(os.environ["LOCAL_RANK"])
    context = DeviceContext.select(local_rank)
    compat.apply(context.is_cuda)
    groups = initialize(config, context)
    _compare_runs(config)
    if context.is_cuda:
        for is_turn in (local_rank == 0, local_rank != 0):  # local rank 0 compiles for all local ranks
            with all_or_none():
                if is_turn:
                    try_kernel(context.device)
    phases = PhaseClock()
    with guarding(config, phases), _locked_folder(config):
        this_run = build_run(config, context, groups, phases)
        from_rank_0(lambda: _compare_data(this_run))
        if this_run.start_iteration < this_run.config.training.train_iters:
            # A length in epochs becomes steps only now; other lengths are written as the user gave them.
            written = config if config.training.train_epochs is None else this_run.config
            from_rank_0(lambda: _write_records(written))
        config = this_run.config
        if this_run.start_iteration and config.adapter.is_on:
            write_adapters(this_run, this_run.start_iteration)
        scores = [TaskScores(this_run)] if config.data.eval_tasks is not None else []
        with fail_together("the run's records cannot be opened", CheckpointError):
            hooks = build_hooks(this_run, *(score.measure for score in scores))
        exit_code = Trainer(this_run, [*hooks, *scores]).train()
        if not exit_code and config.checkpoint.export_hf:
            _export(this_run)
    exit_code = announce_end(WorkerExit(exit_code))
    try:
        shutdown()
    except RuntimeError as error:  # the run is done, so a rank that has already left does no harm
        _logger.warning("leaving the job: %s", error)
    return exit_code


def build_hooks(run: Run, measure: Measure = LOWEST_LOSS) -> list[TrainerHook]:
    """Return the hooks of this rank in call order; `measure` decides which checkpoint is the best."""
    hooks: list[TrainerHook] = []
    rank, output = dist.get_rank(), Path(run.config.checkpoint.output_path)
    start, last = run.start_iteration, run.config.training.train_iters
    if (steps := profiled_steps(run.config.checkpoint.profile)) is not None:
        if steps.start > last or steps[-1] <= start:
            _logger.warning("--profile: no trace, because this run does steps %d to %d", start + 1, last)
        is_cuda, settle = run.device.type == "cuda", run.optimizer.finish_param_sync
        hooks.append(StepProfile(output, steps, rank, start, is_cuda=is_cuda, settle=settle))
    if rank == 0:
        root = checkpoint_root(run.config)
        take_metrics(run.config, start)
        hooks += [
            MetricsLog(output, start),
            LastSaved(output),
            LossPlot(output),
            ProgressDisplay(start, last),
            RateWarning(run.config.optimizer.lr),
            _retention(run, root, measure),
        ]
        if isinstance(root, RemotePath):
            hooks.append(StoreMetrics(output, root))
        if run.config.checkpoint.services:
            hooks.append(Reporter(output, run.config.checkpoint.services, start))
    return hooks + [hook for make in HOOKS if (hook := make(run)) is not None]


def _retention(run: Run, root: AnyPath, measure: Measure) -> CheckpointRetention:
    """Return the hook that removes checkpoints; with --save-retain-every alone, it also keeps the newest."""
    config = run.config.checkpoint
    last, every = config.save_retain_last, config.save_retain_every
    retention = Retention(last or (1 if every else None), every)
    weights_only = run.config.training.train_iters if config.save_weights_only_at_end else None
    metrics = Path(config.output_path) / METRICS_FILE
    return CheckpointRetention(metrics, root, retention, run.start_iteration, weights_only, measure)


def _compare_runs(config: RunConfig) -> None:
    """Refuse, on all ranks, values that differ between ranks, given by the user or chosen by `auto`."""
    # Otherwise ranks would train different runs or deadlock.
    names = (each.name for each in FIELDS.values() if not each.is_path)
    shared = {name: scalar_of(config, name) for name in names if name not in _PER_MACHINE_FIELDS}
    per_rank = all_gather_object(shared)
    for rank, values in enumerate(per_rank):
        for name, value in values.items():
            if value != (first := per_rank[0][name]):
                why = "expected the same on all ranks: start all machines with it, also where auto chose it"
                error = ConfigError(f"got {first} on rank 0 and {value} on rank {rank}, {why}", field=name)
                raise on_all_ranks(error)


@contextmanager
def _locked_folder(config: RunConfig) -> Iterator[None]:
    """Lock the run's folder and its store on rank 0; raise a failure on all ranks."""
    with ExitStack() as stack:
        with all_or_none():
            if os.environ["RANK"] == "0":
                stack.enter_context(hold_run(Path(config.checkpoint.output_path)))
                root = checkpoint_root(config)
                if isinstance(root, RemotePath):
                    stack.enter_context(hold_run(root))
                    take_records(config)
        yield


def _compare_data(this_run: Run) -> None:
    """Record the data of a new run; compare the data of a resumed run with the record."""
    remember_data(this_run.config, this_run.data.records)
    for warning in check_tokens(this_run.config, this_run.data.records):
        _logger.warning("%s", warning)


def _write_records(config: RunConfig) -> None:
    write_record(Path(config.checkpoint.output_path) / CONFIG_FILE, to_yaml(config))
    send_records(config)


def _export(this_run: Run) -> None:
    config = this_run.config
    target = Path(config.checkpoint.output_path) / HF_FOLDER
    load = config.checkpoint.load
    with this_run.optimizer.meta_weights() as visit:
        export_hf(
            this_run.stages,
            target,
            config.model,
            this_run.groups,
            hf_source=Path(load) if load is not None and has_hf_config(load) else None,
            tokenizer=this_run.tokenizer,
            adapter=config.adapter if config.adapter.is_on else None,
            visit=visit,
            step=max(this_run.start_iteration, config.training.train_iters),
        )
