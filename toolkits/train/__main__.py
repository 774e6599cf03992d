"""Train a LLaMA: launcher and worker of a run in one command line.

`llama-patch train ENV MODEL_SIZE ... OUTPUT_BASEPATH [flags]`, or flags alone (see `--help`). It is a worker
and trains if LOCAL_RANK is set (by our launcher or torchrun), or if it is one of several SLURM tasks on a
machine. Otherwise it is the launcher: it checks the configuration and starts a worker for each local rank.
The launcher starts workers by this file's path, so the folder contains no other program. A program that
registers extensions (`patch.training`) and then calls `main` passes its own path.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":  # a worker finds no packages otherwise
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from patch.config.fields import with_values
from patch.launch.worker_process import (  # noqa: E402
    announce_end,
    begin,
    claim_error_report,
    failure,
)

begin()  # before slow imports and before any thread

from patch.config import RunConfig, read_run, user_message  # noqa: E402
from patch.device import MachineFacts  # noqa: E402
from patch.errors import PatchError  # noqa: E402
from patch.launch import RESOLVED  # noqa: E402
from patch.logger import configure_logging, get_logger  # noqa: E402

_logger = get_logger(__name__)


def _resolved_run(file: Path) -> RunConfig:
    """Return the launcher's resolved run. With --min-nodes it is resolved again for the remaining machines;
    the rules allow their number, because the launcher starts workers only on `usable_sizes`."""
    config = read_run(file)
    if config.parallel.min_nodes is None:
        return config
    from patch.plan.resolve import resolve_run

    num_machines = int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])
    config = with_values(config, nnodes=num_machines)
    return resolve_run(config, MachineFacts.probe())[0]


def main(argv: list[str], script: str = __file__) -> int:
    """Run the command line; return the exit code (docs/resuming.md lists them).

    Args:
        argv: the command line without the program's name.
        script: file of the calling program, which its workers run again.
    """
    configure_logging()
    try:
        if argv[:1] != [RESOLVED]:
            from toolkits._start import start  # workers of our launcher do not need it

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
    except KeyboardInterrupt:  # before training there is nothing to save
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
