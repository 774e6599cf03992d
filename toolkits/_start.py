"""Command line of a run before training: check it, describe it, and start the workers.

Workers of our launcher read the resolved run and do not import this module. Workers that torchrun or srun has
started run it themselves.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from patch.checks.layout import set_spares_aside
from patch.config import RunConfig, to_yaml, unknown_variables
from patch.config.choices import ROW_KINDS
from patch.config.fields import check_choice
from patch.device import MachineFacts
from patch.errors import ConfigError, MemoryLackError, TrainingError
from patch.launch.launcher import allocator_environment, launch
from patch.logger import configure_logging, get_logger
from patch.plan.describe import describe_length, start_lines
from patch.plan.fits import fit_of
from patch.plan.memory import disk_bytes
from patch.plan.resolve import resolve_run
from patch.preflight.cluster import slurm_task
from patch.preflight.hub_names import fetch_from_hub
from patch.preflight.parse import Invocation, parse_args
from patch.preflight.resume_guard import resume_notes
from patch.preflight.validate import check_offload_room, run_warnings, validate_run
from patch.preflight.weight_files import check_start
from patch.storage.hub import push_model
from patch.storage.names import HF_FOLDER, PUSHED_FILE
from patch.training import OBJECTIVES

_logger = get_logger(__name__)


def start(argv: list[str], script: Path) -> int:
    """Start the workers of a run and wait for them, or train as a scheduler's worker; return the exit code.

    Args:
        argv: the command line without the program's name.
        script: the Python file that workers of our launcher run.
    """
    os.environ.update(slurm_task(argv[0] if argv else "", os.environ))
    is_worker = "LOCAL_RANK" in os.environ
    if is_worker:
        configure_logging()  # the rank is known only now
        os.environ.update(allocator_environment(os.environ))
    else:  # before parsing: a misspelled variable may be the reason why the run is refused
        for warning in unknown_variables(os.environ):
            _logger.warning("%s", warning)
    machine = MachineFacts.probe()
    if is_worker and machine.cuda_devices == 1 and "SLURM_LOCALID" in os.environ:
        # SLURM may show each task only its own GPU.
        machine = replace(machine, cuda_devices=int(os.environ["LOCAL_WORLD_SIZE"]))
    invocation = parse_args(argv, os.environ, machine)
    invocation, notes = _check(invocation, machine)
    if is_worker and not invocation.dry_run:
        _work(invocation.config, machine)
        return 0
    check_start(invocation.config)
    for warning in run_warnings(invocation.config):
        _logger.warning("%s", warning)
    for note in notes:
        _logger.info("%s", note)
    if invocation.dry_run:
        _describe(invocation, machine)
    if not invocation.force and not fit_of(invocation.config, machine).is_whole:
        from patch.plan.suggest import refuse_what_cannot_fit  # imported only if the run does not fit

        refuse_what_cannot_fit(invocation.config, machine)
    if invocation.dry_run:
        return 0
    _say_memory(invocation.config, machine)
    return launch(script, invocation.config, invocation.rendezvous, machine) or _push(invocation)


def _check(invocation: Invocation, machine: MachineFacts) -> tuple[Invocation, list[str]]:
    config, spares = set_spares_aside(invocation.config, machine)
    rendezvous = invocation.rendezvous._replace(
        num_spares=invocation.config.parallel.nnodes - config.parallel.nnodes
    )
    check_choice(config.training.objective, list(OBJECTIVES), "--objective")
    notes = validate_run(config, machine)
    config = fetch_from_hub(config, weights=not invocation.dry_run)
    if config.data.dataset_type == "raw" and config.training.objective in ("default", "sft", *ROW_KINDS):
        from patch.data.first_rows import check_first_rows  # only raw data has rows

        check_first_rows(config.data, config.row_kind)
    config, chosen = resolve_run(config, machine)
    check_offload_room(config, disk_bytes(config, machine) * config.parallel.nproc_per_node * 3 // 2)
    notes = [*invocation.notes, *spares, *notes, *chosen, *resume_notes(config)]
    return invocation._replace(config=config, rendezvous=rendezvous), notes


def _push(invocation: Invocation) -> int:
    """Upload the exported model from the first machine, after all ranks have ended."""
    config = invocation.config.checkpoint
    if config.push_to_hub and not invocation.rendezvous.node_rank:
        output = Path(config.output_path)
        _logger.info("%s is uploaded", output / HF_FOLDER)
        page = push_model(output / HF_FOLDER, config.push_to_hub, output / PUSHED_FILE, config.push_to_hub_as)
        _logger.info("pushed to %s", page)
    return 0


def _describe(invocation: Invocation, machine: MachineFacts) -> None:
    config = invocation.config
    from patch.plan.report import describe_here

    sys.stdout.write(to_yaml(config))
    sys.stderr.write("\n".join(describe_here(config, machine)) + "\n")
    from patch.compat import quick_start  # imports torch, which only --dry-run needs in the launcher

    with quick_start():
        objective = OBJECTIVES[config.training.objective](config)
    if (samples := objective.show_data(sys.stderr)) is not None:
        sys.stderr.write(describe_length(config, samples) + "\n")


def _work(config: RunConfig, machine: MachineFacts) -> None:
    """Train as a worker of torchrun or SLURM. Flags that only our launcher can fulfil are refused."""
    parallel, who = config.parallel, "torchrun or SLURM has started this process, and"
    if parallel.max_restarts:
        raise ConfigError(
            f"got {parallel.max_restarts}, expected 0: {who} starts it again", field="max_restarts"
        )
    if parallel.log_dir:
        raise ConfigError(f"got {parallel.log_dir}, expected none: {who} writes its log", field="log_dir")
    if (repo := config.checkpoint.push_to_hub) is not None:
        raise ConfigError(f"got {repo}, expected none: {who} ends it; push hf/ later", field="push_to_hub")
    if os.environ.get("RANK") == "0":
        _say_memory(config, machine)
    from patch.compat import quick_start

    with quick_start():
        from patch.training.worker import run

    try:
        run(config)
    except MemoryLackError as error:
        from patch.plan.suggest import advice

        raise TrainingError(f"{error}; {advice(config, machine, on_device=error.on_device)}") from error


def _say_memory(config: RunConfig, machine: MachineFacts) -> None:
    for line in start_lines(config, machine):
        _logger.info("%s", line)
