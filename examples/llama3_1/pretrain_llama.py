"""Trains a LLaMA: the command line of a run, launcher and worker in one file.

`python pretrain_llama.py ENV MODEL_SIZE ... OUTPUT_BASEPATH [flags]`, or flags alone (see `--help`). Without
LOCAL_RANK in the environment it checks the configuration and starts one worker for each local rank. With
LOCAL_RANK (set by our launcher, torchrun or a scheduler) it is a worker and trains.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an installation

from patch.config import (  # noqa: E402
    Invocation,
    RunConfig,
    fetch_from_hub,
    parse_args,
    resume_notes,
    run_warnings,
    to_flags,
    to_yaml,
    unknown_variables,
    user_message,
    validate_run,
)
from patch.device import MachineFacts  # noqa: E402
from patch.distributed.launch import allocator_environment, claim_error_report, launch  # noqa: E402
from patch.errors import PatchError  # noqa: E402
from patch.logger import configure_logging, get_logger  # noqa: E402
from patch.plan import describe_length, describe_plan, resolve_sharding  # noqa: E402

_logger = get_logger(__name__)


def _check(invocation: Invocation, machine: MachineFacts) -> tuple[RunConfig, list[str]]:
    notes = validate_run(invocation.config, machine)
    config = fetch_from_hub(invocation.config, weights=not invocation.dry_run)
    config, choices = resolve_sharding(config, machine)
    return config, notes + choices + resume_notes(config)


def _launch(invocation: Invocation, machine: MachineFacts) -> int:
    config = invocation.config
    return launch(Path(__file__).resolve(), to_flags(config), config, invocation.rendezvous, machine)


def _describe(invocation: Invocation, machine: MachineFacts) -> None:
    config = invocation.config
    sys.stdout.write(to_yaml(config))
    sys.stderr.write(describe_plan(config, machine) + "\n")
    from patch.compat import quick_start  # it imports torch, which the launcher does not need

    with quick_start():
        from patch.data.preview import show_data

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


def main(argv: list[str]) -> int:
    """Run the command line; returns the exit code (0, 2 to 5, 130 or 143; see the README)."""
    configure_logging()
    # Upstream warns at import that Apex and Transformer Engine are missing; they are not used.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    is_worker = "LOCAL_RANK" in os.environ
    if is_worker:  # also for workers that torchrun started
        os.environ.update(allocator_environment(os.environ))
    else:  # first of all, because the misspelled variable may be why the run is refused
        for warning in unknown_variables(os.environ):
            _logger.warning("%s", warning)
    try:
        machine = MachineFacts.probe()
        invocation = parse_args(argv, os.environ, machine)
        config, notes = _check(invocation, machine)
        invocation = invocation._replace(config=config)
        if is_worker and not invocation.dry_run:
            from patch.compat import quick_start

            with quick_start():
                from patch.training import run

            run(config)
            return 0
        for warning in run_warnings(config):
            _logger.warning("%s", warning)
        for note in notes:
            _logger.info("%s", note)
        if not invocation.dry_run:
            return _launch(invocation, machine)
        _describe(invocation, machine)
        return 0
    except PatchError as error:
        if claim_error_report():
            _logger.error("%s", user_message(error))
        return error.exit_code
    except KeyboardInterrupt:  # training has not begun, so there is nothing to save
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
