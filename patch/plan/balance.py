"""How evenly the pipeline's stages share the work of a step, and which stages would share it better."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

from patch.checks.rules import is_legal
from patch.config import RunConfig
from patch.device import MachineFacts
from patch.layout.pipeline_stages import layout_text, split_layers, stage_activations
from patch.plan.flops import output_in_layers
from patch.plan.pipeline import Schedule, Timing, simulate

_WORTHWHILE = 0.99
"""Another split is named if its step takes at most this share of the time."""


class StageWork(NamedTuple):
    """Work of one micro-batch in each stage, in the order of the model; the unit is a layer's forward."""

    forward: list[float]
    backward: list[float]
    """Twice the forward, and what is recomputed."""

    @property
    def layers(self) -> list[float]:
        """The work of each stage: as many layers, computed without recomputation, would be as much work."""
        return [sum(both) / 3 for both in zip(self.forward, self.backward, strict=True)]


class Split(NamedTuple):
    """Another way to cut the layers."""

    flags: str
    """What a user gives for it."""
    run: RunConfig
    """The run with it."""
    timing: Timing


def stage_work(config: RunConfig) -> StageWork:
    """The work of a run's stages by their FLOPs: of layers and output layer; the embedding has none."""
    layers = config.stage_layers
    forward = [float(count) for count in layers]
    forward[-1] += output_in_layers(config)
    recomputed = [stage_activations(count, config.training).recomputed for count in layers]
    backward = [2 * own + again for own, again in zip(forward, recomputed, strict=True)]
    return StageWork(forward, backward)


def step_timing(config: RunConfig) -> Timing:
    """The times of a step's passes; the unit is a layer's forward."""
    work = stage_work(config)
    return simulate(Schedule.of(config), work.forward, work.backward)


def better_split(config: RunConfig, machine: MachineFacts) -> Split | None:
    """The split with the shortest step, if it is worth a change.

    Args:
        config: the run.
        machine: where it runs.
    """
    splits = [
        Split(flags, run, step_timing(run)) for flags, run in _other_splits(config) if is_legal(run, machine)
    ]
    best = min(splits, key=lambda split: split.timing.step, default=None)
    is_better = best is not None and best.timing.step <= _WORTHWHILE * step_timing(config).step
    return best if is_better else None


def _other_splits(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """The run with output layer and loss counted as a layer, and with as many as its FLOPs say."""
    plain = dataclasses.replace(
        config.parallel,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
        pipeline_model_parallel_layout=None,
    )
    if config.parallel == plain:
        counted = dataclasses.replace(plain, account_for_loss_in_pipeline_split=True)
        yield "--account-for-loss-in-pipeline-split", dataclasses.replace(config, parallel=counted)
    num_layers, num_stages = config.model.num_layers, len(config.stage_layers)
    of_output = output_in_layers(config)
    share = (num_layers + of_output) / num_stages - of_output
    for last in {max(0, math.floor(share)), max(0, math.ceil(share))}:
        layout = layout_text([*split_layers(num_layers - last, num_stages - 1), last])
        by_hand = dataclasses.replace(
            plain, pipeline_model_parallel_layout=layout, num_layers_per_virtual_pipeline_stage=None
        )
        flags = f"--pipeline-model-parallel-layout '{layout}'"
        if config.parallel.num_layers_per_virtual_pipeline_stage:
            flags += " instead of --num-layers-per-virtual-pipeline-stage"
        yield flags, dataclasses.replace(config, parallel=by_hand)
