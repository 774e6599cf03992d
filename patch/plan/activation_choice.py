"""The choice of `--recompute-granularity auto` (AC=auto): the cheapest way to fit activations on the device.

Looked at are: all kept; selective; the first layers of each stage offloaded, the others kept whole or with
selective; the first layers recomputed; all layers recomputed, also in blocks. Of each, the fewest layers that
fit. Costs are in forwards of a layer, by the time model (timing/layer_time.py): recomputation repeats one; an
offloaded layer costs what its copies take longer than the forward and backward beside which they run.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import NamedTuple

from patch.config import RunConfig
from patch.device import MachineFacts
from patch.logger import get_logger
from patch.numbers import size_text
from patch.plan.fits import Fit, fit_of, heaviest_rank
from patch.plan.memory import device_memory, usable_device_memory
from patch.plan.savings import Mix, with_mix
from patch.plan.timing.layer_time import layer_times
from patch.plan.timing.machine_presets import machines_of

_logger = get_logger(__name__)

SELECTIVE_COST = 0.05
"""Share of a layer's forward, where the device's speed is not known: selective recomputation repeats no
product, but reads and writes memory."""
OFFLOAD_COST = 0.1
"""Share of a layer's forward, also where its copies are hidden, which take bandwidth from compute.
Assumed."""


class Candidate(NamedTuple):
    """A mix, what it needs and what it costs."""

    mix: Mix
    fit: Fit
    cost: float
    """Cost of a micro-batch in the largest stage: more than if all is kept, in forwards of a layer."""

    @property
    def fits_device(self) -> bool:
        """Whether the device has room."""
        return self.fit.device_needed <= self.fit.device_usable

    @property
    def fits_host(self) -> bool:
        """Whether the host has room for offloaded layers."""
        return not self.mix.offloaded or self.fit.is_on_host

    @property
    def fits(self) -> bool:
        """Whether device and host have room."""
        return self.fits_device and self.fits_host


def resolve_activations(config: RunConfig, machine: MachineFacts) -> tuple[RunConfig, list[str]]:
    """Replace `auto` by the cheapest mix that fits, or by the smallest that fits the host.

    Returns:
        the run with the flags of a mix instead of auto, and lines about what was looked at.
    """
    if config.training.recompute_granularity != "auto":
        return config, []
    search = _Search(config, machine)
    candidates = list(search.candidates())
    fitting = [candidate for candidate in candidates if candidate.fits]
    if fitting:
        chosen = min(fitting, key=lambda candidate: candidate.cost)
    else:
        chosen = min(
            candidates, key=lambda candidate: (not candidate.fits_host, candidate.fit.device_needed)
        )
        _logger.warning(
            "--recompute-granularity auto: no mix fits the device, so this run may end out of memory: more "
            "PP, TP or CP, a smaller micro-batch or optimizer offload need less"
        )
    lines = [search.line(candidate, is_chosen=candidate is chosen) for candidate in candidates]
    named = [f"--recompute-granularity auto: {line}" for line in (search.room_line(), *lines)]
    return with_mix(config, chosen.mix), named


class _Search:
    """The mixes that come into question, with what they need and cost.

    Args:
        config: the run.
        machine: where it runs.
    """

    def __init__(self, config: RunConfig, machine: MachineFacts) -> None:
        self._config, self._machine = with_mix(config, Mix()), machine
        self._num_layers = max(config.stage_layers)
        # A simulated device has no speed.
        self._timed_on = machines_of(config, machine) if machine.cuda_devices else None

    def candidates(self) -> Iterator[Candidate]:
        """All kept, selective, and of each other kind the one with the fewest layers that fits the device."""
        most = self._num_layers
        yield (all_kept := self._candidate(Mix()))
        if all_kept.fits:
            return
        yield self._candidate(Mix("selective"))
        yield self._fewest(most, lambda layers: Mix(offloaded=layers))
        yield self._fewest(most, lambda layers: Mix("selective", offloaded=layers))
        if most > 1:
            yield self._fewest(most - 1, lambda layers: Mix("full", "block", layers))
        for block in range(1, most + 1):
            if math.gcd(block, *self._config.stage_layers) == block:
                full = self._candidate(Mix("full", recomputed=block))
                yield full
                if full.fits:
                    return

    def _fewest(self, most: int, mix_of: Callable[[int], Mix]) -> Candidate:
        """The first of the mixes with 1, 2, ... layers that fits the device, or that with `most`."""
        largest = self._candidate(mix_of(most))
        if not largest.fits_device:
            return largest
        layers = 1 + bisect_left(
            range(1, most), True, key=lambda layers: self._candidate(mix_of(layers)).fits_device
        )
        return self._candidate(mix_of(layers))

    def _candidate(self, mix: Mix) -> Candidate:
        return Candidate(mix, fit_of(with_mix(self._config, mix), self._machine), self._cost(mix))

    def _cost(self, mix: Mix) -> float:
        if mix.granularity == "full":
            return float(self._num_layers if mix.method == "uniform" else mix.recomputed)
        selective, offload = SELECTIVE_COST, self._num_layers + 1.0  # rather recompute all
        if self._timed_on is not None:
            times = layer_times(with_mix(self._config, mix), self._timed_on)
            forward = times.forward.total
            selective, offload = times.selective / forward, OFFLOAD_COST + times.offload / forward
        is_selective = mix.granularity == "selective"
        return (selective * self._num_layers if is_selective else 0.0) + mix.offloaded * offload

    def room_line(self) -> str:
        """What the choice assumes."""
        usable = size_text(usable_device_memory(self._config, self._machine))
        total = size_text(device_memory(self._config, self._machine))
        device = "GPU" if self._machine.cuda_devices else "simulated device"
        speed = "of unknown speed, so recomputation goes before offload"
        if self._timed_on is not None:
            machine, times = self._timed_on, layer_times(self._config, self._timed_on)
            link = machine.host_link_bandwidth * machine.reached.host_link
            speed = (
                f"a layer's forward takes {1e3 * times.forward.total:.1f} ms by plan; the host is reached "
                f"with {link / 1e9:.0f} GB/s"
            )
        return f"{usable} of the {total} of a {device} may be used, {speed}"

    def line(self, candidate: Candidate, *, is_chosen: bool) -> str:
        """A line about a candidate."""
        mix, fit, cost = candidate
        why = "" if candidate.fits_host else ", which host memory has no room for"
        host = ""
        if mix.offloaded:
            rank = heaviest_rank(with_mix(self._config, mix), cuda=bool(self._machine.cuda_devices))
            host = f" and {size_text(rank.activations.on_host)} on the host{why}"
        costs = f", costs {cost:.1f} forwards of a layer ({self._num_layers} in a stage)" if cost else ""
        chosen = "" if not is_chosen else ", chosen" if candidate.fits else ", chosen, although too much"
        return f"{mix.words} needs {size_text(fit.device_needed)} a rank{host}{costs}{chosen}"
