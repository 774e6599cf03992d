"""Warns of a loss or gradient norm far above those of the last steps, and names the step's samples; of a loss
that grows tenfold in the first steps it names the learning rate.

The warning names a few of them; log/spikes.jsonl gets one object for each spike, with all of them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import orjson

from patch.config.positions import where
from patch.logger import get_logger
from patch.numbers import counted
from patch.storage.names import SPIKES_FILE
from patch.training.guards.non_finite import named_samples, samples_of_step
from patch.training.setup import Run

_logger = get_logger(__name__)

WINDOW = 100
"""Steps that a value is compared with."""
_MOST_NAMED = 3
"""Samples that a warning names."""
_FEWEST = 20
"""Steps before the first comparison."""
_SIGMAS = 1.4826
"""Standard deviations of a normal distribution in its median absolute deviation."""
_SMALLEST_SHARE = 0.01
"""Share of the median: a deviation that counts at least, so that nearly constant values give no warnings."""
_SMALLEST_RISE = 0.1
"""Rise of a loss, in nats: where a model knows its data nearly by heart, any sample is far above the median.
Below such a loss a norm is no spike either: it is that of the few tokens that are not yet known."""


class SpikeWarnings:
    """The warnings of rank 0; they change nothing in training.

    Args:
        run: the run; `--spike-factor` says how many standard deviations above the median are a spike.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._file = Path(run.config.checkpoint.output_path) / SPIKES_FILE
        self._factor = run.config.training.spike_factor
        self._tenfold = 0.0
        """Ten times the first loss, 0 before it: a loss above that in the first steps is the rate's doing."""
        # A norm that is not clipped does no harm.
        norms = _Series(least=run.config.optimizer.clip_grad)
        self._series = {"loss": _Series(smallest_rise=_SMALLEST_RISE), "gradient norm": norms}

    def note(self, iteration: int, loss: float, grad_norm: float) -> None:
        """Compare a step with those before it.

        Args:
            iteration: counted from 0.
            loss: mean over the learned tokens of the global batch.
            grad_norm: before clipping.
        """
        if self._factor is None:
            return
        if not self._tenfold:
            self._tenfold = 10 * max(loss, _SMALLEST_RISE)
        elif iteration < WINDOW and self._tenfold < loss < math.inf:
            self._tenfold = math.inf
            said = "step %d: the loss has grown tenfold, to %.4g. The rate is probably too high: %s is %g"
            _logger.warning(said, iteration + 1, loss, where("lr"), self._run.config.optimizer.lr)
        for (name, series), value in zip(self._series.items(), (loss, grad_norm), strict=True):
            usual = series.usual_if_spike(value, self._factor)
            if usual is not None and loss >= _SMALLEST_RISE:
                samples = samples_of_step(self._run, iteration)
                _logger.warning(
                    "step %d: %s %.4g, far above the usual %.4g; the first of its %s: %s; all are in %s",
                    iteration + 1, name, value, usual, counted(len(samples), "sample"),
                    named_samples(self._run, samples[:_MOST_NAMED]), self._file,
                )  # fmt: skip
                spike = {"iteration": iteration + 1, "value_of": name, "value": value, "usual": usual}
                self._append({**spike, "samples": self._described(samples)})

    def _described(self, samples: Sequence[int]) -> list[dict[str, Any]]:
        place = self._run.data.sample_place
        return [{"number": each, "place": place and place(each)} for each in samples]

    def _append(self, spike: dict[str, Any]) -> None:
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("ab") as file:
                file.write(orjson.dumps(spike) + b"\n")
        except OSError as error:
            _logger.warning("%s cannot be written: %s", self._file, error.strerror)


class _Series:
    """One value of the last steps.

    Args:
        smallest_rise: how far a spike is at least above the median.
        least: what a spike is at least.
    """

    def __init__(self, smallest_rise: float = 0.0, least: float = 0.0) -> None:
        self._smallest_rise, self._least = smallest_rise, least
        self._values: deque[float] = deque(maxlen=WINDOW)
        self._was_spike = False

    def usual_if_spike(self, value: float, factor: float) -> float | None:
        """Add a value; the median of those before it if it is the first of a spike, else None.

        Args:
            value: of this step; one that is not finite is not counted, it is reported elsewhere.
            factor: see `SpikeWarnings`.
        """
        if not math.isfinite(value):
            return None
        is_spike, usual = False, 0.0
        if len(self._values) >= _FEWEST:
            usual = median(self._values)
            spread = _SIGMAS * median(abs(each - usual) for each in self._values)
            rise = max(factor * max(spread, _SMALLEST_SHARE * abs(usual)), self._smallest_rise)
            is_spike = value > usual + rise and value >= self._least
        self._values.append(value)
        is_first, self._was_spike = is_spike and not self._was_spike, is_spike
        return usual if is_first else None
