"""Named regions in torch's profiler that cost nothing while nobody profiles, and all threads in a trace.

- torch/autograd/profiler.py:84 knows by a private flag whether a profiler runs. `record_function` without
  one costs some microseconds, of which a step would have hundreds. Delete when there is a public flag.
- torch/profiler/profiler.py takes a private class for the option that threads which were started before the
  profiler are recorded, too: the one that updates offloaded states is. Delete when there is a public option.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile, record_function

_NOTHING = nullcontext()


def region(name: str, *values: object) -> AbstractContextManager[object]:
    """A context whose time is in the trace of a profiler that runs, under this name.

    Args:
        name: the name, with a `%` for each value.
        values: put into the name, if a profiler runs.
    """
    return record_function(name % values) if profiler._is_profiler_enabled else _NOTHING


class Phases:
    """Regions one after the other: one ends where the next begins."""

    def __init__(self) -> None:
        self._current: record_function | None = None

    def begin(self, name: str) -> None:
        """End the region that is open, and open the next one if a profiler runs."""
        self.end()
        if profiler._is_profiler_enabled:
            self._current = record_function(name)
            self._current.__enter__()

    def end(self) -> None:
        """End the region that is open."""
        if self._current is not None:
            self._current.__exit__(None, None, None)
            self._current = None


def step_profiler(*, is_cuda: bool) -> profile:
    """A profiler of all threads of this process, and of its GPU."""
    activities: Sequence[ProfilerActivity] = [ProfilerActivity.CPU]
    if is_cuda:
        activities = [*activities, ProfilerActivity.CUDA]
    options = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    return profile(activities=activities, acc_events=True, experimental_config=options)
