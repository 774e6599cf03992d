"""Trains a LLaMA: the command line of a run, launcher and worker in one file.

`llama-patch train ENV MODEL_SIZE ... OUTPUT_BASEPATH [flags]`, or flags alone (see `--help`). Without
LOCAL_RANK in the environment it checks the configuration and starts one worker for each local rank. With
LOCAL_RANK (set by our launcher or torchrun), or as one of several SLURM tasks on a machine, it is a worker
and trains. The launcher starts workers by this file's path, so the folder holds nothing else.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":  # a worker, which has no other way to the packages
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from patch.distributed.worker_process import (  # noqa: E402
    announce_end,
    begin,
    claim_error_report,
    failure,
    is_launched,
)

begin()  # before anything that takes time or starts threads

from patch.checks import set_spares_aside  # noqa: E402
from patch.config import RunConfig, read_run, to_yaml, unknown_variables, user_message  # noqa: E402
from patch.device import MachineFacts  # noqa: E402
from patch.distributed.launch import allocator_environment, launch  # noqa: E402
from patch.errors import ConfigError, PatchError, about  # noqa: E402
from patch.logger import configure_logging, get_logger  # noqa: E402
from patch.plan import (  # noqa: E402
    describe_here,
    describe_length,
    refuse_what_cannot_fit,
    resolve_run,
)
from patch.preflight import (  # noqa: E402
    Invocation,
    Rendezvous,
    fetch_from_hub,
    parse_args,
    resume_notes,
    run_warnings,
    slurm_task,
    validate_run,
    weights_here,
)

_logger = get_logger(__name__)
_RESOLVED = "--resolved-run"
"""Before the file from which workers read what their launcher has resolved."""


def _check(invocation: Invocation, machine: MachineFacts) -> tuple[Invocation, list[str]]:
    config, spares = set_spares_aside(invocation.config, machine)
    rendezvous = invocation.rendezvous._replace(
        num_spares=invocation.config.parallel.nnodes - config.parallel.nnodes
    )
    notes = validate_run(config, machine)
    config = fetch_from_hub(config, weights=not invocation.dry_run)
    config, chosen = resolve_run(config, machine)
    notes = [*invocation.notes, *spares, *notes, *chosen, *resume_notes(config)]
    return invocation._replace(config=config, rendezvous=rendezvous), notes


def _launch(invocation: Invocation, machine: MachineFacts) -> int:
    """Start workers that read the resolved run from a file of this user's and check nothing again."""
    config = invocation.config
    with tempfile.TemporaryDirectory(prefix="patch-run-") as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(to_yaml(config), encoding="utf-8")
        command = [_RESOLVED, str(file)]
        return launch(Path(__file__).resolve(), command, config, invocation.rendezvous, machine)


def _resolved_run(file: Path, machine: MachineFacts) -> RunConfig:
    """The run that the launcher has resolved; with --min-nodes on as many machines as there are now."""
    config = read_run(file)
    if config.parallel.min_nodes is None:
        return config
    nnodes = int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])
    config = replace(config, parallel=replace(config.parallel, nnodes=nnodes))
    return _check(Invocation(config, dry_run=False, rendezvous=Rendezvous()), machine)[0].config


def _describe(invocation: Invocation, machine: MachineFacts) -> None:
    config = invocation.config
    sys.stdout.write(to_yaml(config))
    sys.stderr.write("\n".join(describe_here(config, machine)) + "\n")
    from patch.compat import quick_start  # it imports torch, which the launcher does not need

    with quick_start():
        from patch.convert.hf_reader import check_headers
        from patch.data.preview import show_data

    if (folder := weights_here(config)) is not None:
        with about("load"):
            check_headers(folder, config.model)
    samples = show_data(
        config.data,
        config.model,
        config.tokenizer_folder,
        sft=config.training.sft,
        output=Path(config.checkpoint.output_path),
        stream=sys.stderr,
    )
    if samples is not None:
        sys.stderr.write(describe_length(config, samples) + "\n")


def _work(config: RunConfig) -> None:
    parallel, who = config.parallel, "torchrun or SLURM has started this process, and"
    if parallel.max_restarts and not is_launched():
        raise ConfigError(
            f"got {parallel.max_restarts}, expected 0: {who} starts it again", field="max_restarts"
        )
    if parallel.log_dir and not is_launched():
        raise ConfigError(f"got {parallel.log_dir}, expected none: {who} writes its log", field="log_dir")
    from patch.compat import quick_start

    with quick_start():
        from patch.training import run

    run(config)


def _run(argv: list[str], is_worker: bool) -> int:
    machine = MachineFacts.probe()
    if is_worker and machine.cuda_devices == 1 and "SLURM_LOCALID" in os.environ:
        # SLURM may show each task its own GPU only.
        machine = replace(machine, cuda_devices=int(os.environ["LOCAL_WORLD_SIZE"]))
    if argv[:1] == [_RESOLVED]:
        _work(_resolved_run(Path(argv[1]), machine))
        return 0
    invocation = parse_args(argv, os.environ, machine)
    invocation, notes = _check(invocation, machine)
    if is_worker and not invocation.dry_run:
        _work(invocation.config)
        return 0
    for warning in run_warnings(invocation.config):
        _logger.warning("%s", warning)
    for note in notes:
        _logger.info("%s", note)
    if invocation.dry_run:
        _describe(invocation, machine)
    if not invocation.force:
        refuse_what_cannot_fit(invocation.config, machine)
    return 0 if invocation.dry_run else _launch(invocation, machine)


def main(argv: list[str]) -> int:
    """Run the command line; returns the exit code (guides/resuming.md lists them)."""
    configure_logging()
    # Upstream warns at import that Apex and Transformer Engine are missing; they are not used.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    try:
        os.environ.update(slurm_task(argv[0] if argv else "", os.environ))
        is_worker = "LOCAL_RANK" in os.environ
        if is_worker:  # also for workers that torchrun or srun started
            configure_logging()  # now that the rank is known
            os.environ.update(allocator_environment(os.environ))
        else:  # first of all, because the misspelled variable may be why the run is refused
            for warning in unknown_variables(os.environ):
                _logger.warning("%s", warning)
        return _run(argv, is_worker)
    except PatchError as error:
        if claim_error_report():
            _logger.error("%s", user_message(error))
        announce_end(failure(error))
        return error.exit_code
    except KeyboardInterrupt:  # training has not begun, so there is nothing to save
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
