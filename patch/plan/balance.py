"""How evenly the pipeline's stages share the work of a step, and what that costs."""

from __future__ import annotations

from typing import NamedTuple

from patch.config import RunConfig
from patch.plan.flops import output_in_layers
from patch.plan.pipeline import Schedule, Timing, simulate


class StageWork(NamedTuple):
    """Work of one micro-batch in each stage, in the order of the model; the unit is a layer's forward."""

    forward: list[float]
    backward: list[float]
    """Twice the forward, and what is recomputed."""

    @property
    def layers(self) -> list[float]:
        """Of each stage: as many layers, computed without recomputation, would be as much work."""
        return [sum(both) / 3 for both in zip(self.forward, self.backward, strict=True)]


def stage_work(config: RunConfig) -> StageWork:
    """The work of a run's stages by their FLOPs: of layers and output layer; the embedding has none."""
    layers = config.stage_layers
    forward = [float(count) for count in layers]
    forward[-1] += output_in_layers(config)
    recomputed = layers if config.training.recompute_granularity == "full" else [0] * len(layers)
    backward = [2 * own + again for own, again in zip(forward, recomputed, strict=True)]
    return StageWork(forward, backward)


def step_timing(config: RunConfig) -> Timing:
    """The times of a step's passes; the unit is a layer's forward."""
    work = stage_work(config)
    return simulate(Schedule.of(config), work.forward, work.backward)
