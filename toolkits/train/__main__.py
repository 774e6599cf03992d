"""Trains a LLaMA: the command line of a run, launcher and worker in one file.

`llama-patch train ENV MODEL_SIZE ... OUTPUT_BASEPATH [flags]`, or flags alone (see `--help`). Without
LOCAL_RANK in the environment it checks the configuration and starts one worker for each local rank. With
LOCAL_RANK (set by our launcher or torchrun), or as one of several SLURM tasks on a machine, it is a worker
and trains. The launcher starts workers by this file's path, so the folder holds nothing else; or by that of a
program which registers things of its own (`patch.training`) and then calls `main`.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":  # a worker, which has no other way to the packages
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from patch.distributed.worker_process import (  # noqa: E402
    announce_end,
    begin,
    claim_error_report,
    failure,
)

begin()  # before anything that takes time or starts threads

from patch.config import RunConfig, read_run, user_message  # noqa: E402
from patch.device import MachineFacts  # noqa: E402
from patch.errors import PatchError  # noqa: E402
from patch.logger import configure_logging, get_logger  # noqa: E402
from toolkits.train import RESOLVED  # noqa: E402

_logger = get_logger(__name__)


def _resolved_run(file: Path) -> RunConfig:
    """The run that the launcher has resolved; with --min-nodes on as many machines as there are now.

    The launcher starts workers only on numbers of machines that the rules allow (`usable_sizes`).
    """
    config = read_run(file)
    if config.parallel.min_nodes is None:
        return config
    from patch.plan.resolve import resolve_run

    num_machines = int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])
    config = replace(config, parallel=replace(config.parallel, nnodes=num_machines))
    return resolve_run(config, MachineFacts.probe())[0]


def main(argv: list[str], script: str = __file__) -> int:
    """Run the command line; returns the exit code (docs/resuming.md lists them).

    Args:
        argv: the command line without the program's name.
        script: the file of the program that calls this, which its workers run again.
    """
    configure_logging()
    try:
        if argv[:1] != [RESOLVED]:
            from toolkits._start import start  # our launcher's workers need nothing of it

            return start(argv, Path(script).resolve())
        config = _resolved_run(Path(argv[1]))
        from patch.compat import quick_start

        with quick_start():
            from patch.training.worker import run

        run(config)
        return 0
    except PatchError as error:
        if claim_error_report():
            _logger.error("%s", user_message(error))
        announce_end(failure(error))
        return error.exit_code
    except KeyboardInterrupt:  # training has not begun, so there is nothing to save
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
