"""Layers of each pipeline stage, by rule or by `--pipeline-model-parallel-layout`, and how each is kept.

A pipeline stage (with interleaving: each virtual stage) orders its layers in forward as follows:

    offloaded layers first     their activations are away longest, so the copies have the most time
    then recomputed layers     with --recompute-method block; uniform recomputes all layers
    then kept layers           their backward comes first

Imports neither torch nor megatron.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, NoReturn

from patch.errors import ConfigError

_REPETITIONS = (re.compile(r"\(([^)]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)"))
"""Repeats of groups, then of single letters, in megatron-core's order of expansion."""
_MAX_LETTERS = 100_000
_FORM = "a form such as Et*3|t*4|t*4L: E embedding, t layer, L loss, | between stages, (t|)*3 for repeats"


def split_layers(
    num_layers: int, num_stages: int, *, with_embedding: bool = False, with_loss: bool = False
) -> list[int]:
    """Return the layers of each pipeline stage, in the order in which a batch passes the stages.

    If the sum does not divide evenly, the middle stages get the remaining layers first: the first stage also
    has the embedding, and the last stage the output layer. If it divides evenly, this is Megatron-LM's split.
    Virtual stages count as stages.

    Args:
        with_embedding: count the embedding as a layer (`--account-for-embedding-in-pipeline-split`).
        with_loss: count output layer and loss as a layer (`--account-for-loss-in-pipeline-split`).
    """
    fewest, num_remaining = divmod(num_layers + with_embedding + with_loss, num_stages)
    middle_first = [*range(1, num_stages - 1), 0, num_stages - 1]
    layers = [fewest + (stage in middle_first[:num_remaining]) for stage in range(num_stages)]
    layers[0] -= with_embedding
    layers[-1] -= with_loss
    return layers


def layout_layers(layout: str) -> list[int]:
    """Return the layers of each stage of a layout in Megatron-LM's spelling, such as `Et*3|t*4|t*4L`.

    Raises:
        ConfigError: the text is no layout, or has stages that cannot be built.
    """
    letters = layout.replace(",", "")
    for repetition in _REPETITIONS:
        if sum(len(match[1]) * float(match[2]) for match in repetition.finditer(letters)) > _MAX_LETTERS:
            _refuse(layout, f"at most {_MAX_LETTERS} letters", "it repeats something too often")
        letters = repetition.sub(lambda match: match[1] * int(match[2]), letters)
    if "m" in letters:
        _refuse(layout, "no m", "multi-token prediction (MTP) is not supported")
    if unknown := sorted(set(letters) - set("EtL|")):
        _refuse(layout, _FORM, f"{' '.join(unknown)} has no meaning here")
    if letters.count("E") != 1 or letters.count("L") != 1 or letters[0] != "E" or letters[-1] != "L":
        why = "the first stage begins with the embedding, and the last one ends with the loss"
        _refuse(layout, _FORM, why)
    stages = letters.split("|")
    if "" in stages:
        _refuse(layout, _FORM, f"stage {stages.index('') + 1} of {len(stages)} would be empty")
    return [stage.count("t") for stage in stages]


def _refuse(layout: str, expected: str, why: str) -> NoReturn:
    raise ConfigError(f"got {layout}, expected {expected}: {why}", field="pipeline_model_parallel_layout")


def layout_text(stage_layers: list[int]) -> str:
    """Return the layout, for `layout_layers`, of stages with these numbers of layers."""
    return "E" + "|".join(f"t*{layers}" if layers > 1 else "t" * layers for layers in stage_layers) + "L"


def can_be_micro_batch_group(size: int, num_micro_batches: int, pp_size: int) -> bool:
    """Return whether an interleaved stage can run `size` micro-batches before the rank's next stage runs.

    Upstream's schedule (schedules.py:995-1018) wants at least PP micro-batches in each group. This includes
    the last group of a step, which has the remainder.
    """
    last_group = num_micro_batches % size
    return pp_size <= size <= num_micro_batches and (last_group == 0 or last_group >= pp_size)


def smallest_micro_batch_group(num_micro_batches: int, pp_size: int) -> int:
    """Return the smallest group of micro-batches; it keeps the fewest activations."""
    sizes = range(pp_size, num_micro_batches)
    fitting = (size for size in sizes if can_be_micro_batch_group(size, num_micro_batches, pp_size))
    return next(fitting, num_micro_batches)


class StageActivations(NamedTuple):
    """Numbers of layers of one stage, in the order of forward."""

    offloaded: int
    """Layers whose activations are in host memory until backward needs them."""
    recomputed: int
    """Layers that keep only their inputs; with --recompute-method uniform, blocks keep only theirs."""
    kept: int
    """Layers that keep all activations; with AC=sel (like offloaded layers) what selective recomputation
    keeps."""

    @property
    def computed_again(self) -> slice:
        """Positions of the recomputed layers in the stage."""
        return slice(self.offloaded, self.offloaded + self.recomputed)


def stage_activations(num_layers: int, settings: Any) -> StageActivations:
    """Return how a stage splits its layers, by a TrainingConfig or an object with its recomputation fields.

    A stage with fewer layers than requested gives all it has.
    """
    is_full = settings.recompute_granularity == "full"
    if is_full and settings.recompute_method == "uniform":
        return StageActivations(0, num_layers, 0)
    recomputed = settings.recompute_num_layers if is_full else 0
    offloaded = 0
    if settings.cpu_offloading:
        # Backward of the stage's last layer often follows its forward at once.
        all_but_last = max(num_layers - recomputed - 1, 1)
        offloaded = min(settings.cpu_offloading_num_layers or all_but_last, num_layers)
    recomputed = min(recomputed, num_layers - offloaded)
    return StageActivations(offloaded, recomputed, num_layers - offloaded - recomputed)
