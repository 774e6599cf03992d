"""Is the difference between a checkpoint and its Hugging Face folder normal? Measured on what lies on disk.

find_stored, load_ours, load_hf   both models, in one process          stored.py
compare_weights                   every weight, bit by bit             weights.py
compare_logits                    several prompts, both forms of ours  logits.py
first_difference                  the operation where they part        trace.py
sources                           what each fast form adds             here
judge                             the verdict                          verdict.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from patch import compat
from patch.alignment.logits import (
    LogitStats,
    compare_logits,
    hf_logits_of,
    logits_of,
    make_prompts,
)
from patch.alignment.stored import (
    Disagreement,
    find_stored,
    in_form,
    load_hf,
    load_ours,
    run_config,
)
from patch.alignment.trace import FirstDifference, first_difference
from patch.alignment.weights import WeightDifference, compare_weights
from patch.config.schema import ModelConfig
from patch.device import DeviceContext
from patch.distributed.groups import alone
from patch.families import weight_rows
from patch.model import SOURCES, LlamaModel

ONE_FORM = ("rope",)
"""Sources whose fast form is the aligned one: nothing to switch."""


class Measured(NamedTuple):
    """Everything that was found; the verdict follows from it."""

    hf: str
    mcore: str
    device: str
    """cpu or cuda."""
    precision: str
    """In which both models computed: fp32, fp16 or bf16."""
    attention: str
    """transformers' attention: eager or sdpa."""
    prompts: list[int]
    """Their lengths."""
    num_weights: int
    rounded: bool
    """Whether the folder's weights were rounded to the type of the checkpoint."""
    weights: list[WeightDifference]
    disagreements: list[Disagreement]
    fast: LogitStats
    """Ours as it trains by default, against transformers."""
    aligned: LogitStats
    """Ours with --precision-align, against transformers."""
    first: FirstDifference | None
    """Of the aligned form if its logits differ, else of the fast form."""
    sources: dict[str, float]
    """Largest change of a logit when one source alone takes its fast form."""


def measure(hf: Path, mcore: Path, precision: str | None, attention: str) -> Measured:
    """Compare the checkpoint at `mcore` with the folder `hf`; joins a job of one process and leaves it.

    Args:
        precision: in which both compute; None: that of the checkpoint's weights.
        attention: of transformers, eager or sdpa.
    Raises:
        ConfigError: one of the folders is not what it should be. CheckpointError, ConversionError: it is
            damaged, or they are not of the same model.
    """
    context = DeviceContext.select(0)
    compat.apply(context.is_cuda)
    stored = find_stored(mcore, hf)
    precision = precision or stored.precision
    config = run_config(stored, precision, attention)
    with alone(config, context) as groups:
        ours = load_ours(stored, config, groups, context)
        is_tied = not stored.theirs["untie_embeddings_and_output_weights"]
        num_weights, rounded, weights = compare_weights(ours, config.model, hf, is_tied=is_tied)
        theirs = load_hf(hf, stored.precision, precision, attention, context.device)
        prompts = make_prompts(hf, config.model.vocab_size, config.model.max_position_embeddings)
        form = partial(in_form, ours, config, groups, context)
        logits = _measure_logits(form, theirs, prompts, config.model)
    return Measured(
        str(hf), str(mcore), context.device.type, precision, attention,
        [prompt.shape[1] for prompt in prompts], num_weights, rounded, weights, stored.disagreements,
        *logits,
    )  # fmt: skip


def _measure_logits(
    form: Callable[[frozenset[str]], LlamaModel],
    theirs: torch.nn.Module,
    prompts: list[torch.Tensor],
    model: ModelConfig,
) -> tuple[LogitStats, LogitStats, FirstDifference | None, dict[str, float]]:
    """The last four of Measured; `form` makes our model with these sources aligned."""

    def logits(aligned: frozenset[str]) -> list[torch.Tensor]:
        return logits_of(form(aligned), prompts, model.vocab_size)

    every, none = frozenset(SOURCES), frozenset[str]()
    expected, base = hf_logits_of(theirs, prompts), logits(every)
    is_clean = all(torch.equal(*pair) for pair in zip(base, expected, strict=True))
    first = first_difference(form(none if is_clean else every), theirs, prompts[-1], weight_rows(model))
    sources = {
        name: 0.0 if name in ONE_FORM else compare_logits(logits(every - {name}), base).max
        for name in SOURCES
    }
    return compare_logits(logits(none), expected), compare_logits(base, expected), first, sources
