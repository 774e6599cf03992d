"""A hook that records some steps: --profile, one trace a rank.

A trace has the phases of each step, the buckets' reductions and gathers, the chunks' copies and updates, and
waits, by name. `llama-patch timeline` draws it; so do Perfetto and chrome://tracing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch.profiler import profile

from patch.compat.profiler import step_profiler
from patch.logger import get_logger
from patch.storage.names import TRACES_FOLDER
from patch.training.hooks import TrainerHook

_logger = get_logger(__name__)


class StepProfile(TrainerHook):
    """Records steps and writes log/traces/rank_0.json.gz; an error that ends the run cuts the trace short.

    Args:
        output: the run's folder.
        steps: counted from 1.
        rank: of this process in the job.
        num_before: steps that are done; those of `steps` that are among them are not recorded.
        is_cuda: whether the GPU is recorded.
        settle: waits for the messages that a step leaves under way. gloo's threads report their end to the
            profiler, and crash the process if it has stopped meanwhile (seen with torch 2.13).
    """

    def __init__(
        self,
        output: Path,
        steps: range,
        rank: int,
        num_before: int,
        *,
        is_cuda: bool,
        settle: Callable[[], None],
    ) -> None:
        self._file = output / TRACES_FOLDER / f"rank_{rank}.json.gz"
        self._steps, self._is_cuda, self._settle = steps, is_cuda, settle
        self._profiler: profile | None = None
        self._start_before(num_before + 1)

    def on_step(self, iteration: int, seconds: float) -> None:
        """End after the last step to record, begin before the first one."""
        if iteration == self._steps[-1]:
            self._settle()
            self._finish()
        self._start_before(iteration + 1)

    def close(self) -> None:
        """Write what there is."""
        self._finish()

    def _start_before(self, iteration: int) -> None:
        if self._profiler is None and iteration in self._steps:
            self._profiler = step_profiler(is_cuda=self._is_cuda)
            self._profiler.start()

    def _finish(self) -> None:
        if self._profiler is None:
            return
        self._profiler.stop()
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(str(self._file))
            _logger.info("steps %d to %d are in %s", self._steps[0], self._steps[-1], self._file)
        except (OSError, RuntimeError) as error:  # the training itself goes on
            _logger.warning("%s was not written: %s", self._file, error)
        self._profiler = None
