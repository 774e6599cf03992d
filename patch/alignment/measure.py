"""Measurements that compare a checkpoint with its Hugging Face folder, in one process.

find_checkpoint, load_ours, load_hf   both models                            stored.py
compare_weights                       every weight, bit by bit               weights.py
compare_logits                        several prompts, fast and aligned      logits.py
recorded, replayed                    with the same experts for each token   routes.py
first_difference                      the first operation that differs       trace.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from patch import compat
from patch.alignment.logits import (
    LogitStats,
    compare_logits,
    compute_hf_logits,
    compute_logits,
    make_prompts,
)
from patch.alignment.routes import RouteComparison, recorded, replayed, summed
from patch.alignment.stored import ConfigDifference, find_checkpoint, load_hf, load_ours, rebuild
from patch.alignment.trace import FirstDifference, first_difference
from patch.alignment.weights import WeightComparison, compare_weights
from patch.config.schema import ModelConfig, RunConfig
from patch.device import DeviceContext, FloatType
from patch.distributed.groups import alone
from patch.errors import ConfigError
from patch.families import HfAttention, is_llama_like, parts_unlike_llama
from patch.families.adapters import adapts_experts
from patch.model import LlamaModel, sources_of

SINGLE_FORM = ("rope",)
"""Sources whose fast form and aligned form are the same: there is nothing to switch."""


class Measurement(NamedTuple):
    """All measured values; the verdict is derived from them."""

    hf: str
    mcore: str
    device: str
    """cpu or cuda."""
    precision: FloatType
    """Dtype in which both models computed."""
    attention: HfAttention
    """Attention implementation of transformers' model; "eager" if its class has no other."""
    prompt_lengths: list[int]
    weights: WeightComparison
    config_differences: list[ConfigDifference]
    logits: LogitComparison
    parts: dict[str, Any]
    """Traits of the layers that LLaMA's layers lack, such as a norm behind attention, with their values."""
    adapter: str | None = None
    """Folder of the adapters of both models, and how transformers' model has them."""


class LogitComparison(NamedTuple):
    """Logits of two forms of our model, compared with those of transformers' model."""

    fast: LogitStats
    """Default training form."""
    aligned: LogitStats
    """Form with --precision-align; equals `fast` if no operation can be aligned."""
    first: FirstDifference | None
    """First difference of the aligned form if its logits differ, otherwise of the fast form."""
    sources: dict[str, float]
    """Largest change of a logit when one source alone takes its fast form."""
    routes: RouteComparison | None = None
    """Expert choices of the aligned form while it uses transformers' choices, or None without experts."""


def measure(
    hf: Path, mcore: Path, precision: FloatType | None, attention: HfAttention, adapter: Path | None
) -> Measurement:
    """Compare the checkpoint `mcore` with the folder `hf`; arguments and errors as for `report.verify`."""
    context = DeviceContext.select(0)
    if not (context.is_cuda or compat.is_applied_on_cpu()):
        raise ConfigError(
            "megatron-core asks for a GPU, this machine has none: call patch.compat.apply(cuda=False) first"
        )
    stored = find_checkpoint(mcore, hf, adapter)
    precision = precision or stored.precision
    if not is_llama_like(stored.model):
        attention = "eager"  # transformers' class has no other
    model = dataclasses.replace(stored.model, precision_align=attention)
    with alone(context) as groups:
        ours = load_ours(stored, groups, context)
        weights = compare_weights(ours, model, hf, is_tied=stored.is_hf_tied)
        theirs = load_hf(hf, stored, precision, attention, context.device)
        prompts = make_prompts(hf, model.vocab_size, model.max_position_embeddings)
        run = RunConfig.of_model(model, precision=precision, adapter=stored.adapter)
        build_ours = partial(rebuild, ours, run, groups, context)
        # PEFT merges adapters of experts into the weights.
        names = () if adapts_experts(model, stored.adapter) else sources_of(model)
        logits = _compare_forms(build_ours, theirs, prompts, model, names)
    return Measurement(
        hf=str(hf),
        mcore=str(mcore),
        device=context.device.type,
        precision=precision,
        attention=attention,
        prompt_lengths=[prompt.shape[1] for prompt in prompts],
        weights=weights,
        config_differences=stored.config_differences,
        logits=logits,
        parts=parts_unlike_llama(model),
        adapter=stored.adapter_text,
    )


def _compare_forms(
    build_ours: Callable[[frozenset[str]], LlamaModel],
    theirs: torch.nn.Module,
    prompts: list[torch.Tensor],
    model: ModelConfig,
    names: Sequence[str],
) -> LogitComparison:
    """Compare the fast and the aligned form of our model with transformers' model; `names` are the sources.
    `build_ours` takes the sources that follow Hugging Face's order of operations.
    """
    every, none = frozenset(names), frozenset[str]()
    with recorded(theirs, model) as recording:
        expected = compute_hf_logits(theirs, prompts)

    def logits(aligned: frozenset[str]) -> list[torch.Tensor]:
        ours = build_ours(aligned)
        with replayed(ours, recording) as replays:
            found = compute_logits(ours, prompts, model.vocab_size)
        routes.setdefault(aligned, summed(replays))
        return found

    routes: dict[frozenset[str], RouteComparison | None] = {}
    base = logits(every)
    is_equal = all(torch.equal(*pair) for pair in zip(base, expected, strict=True))
    differing = build_ours(none if is_equal else every)
    with replayed(differing, recording, slice(-1, None)):
        first = first_difference(differing, theirs, prompts[-1], model)
    sources = {
        name: 0.0 if name in SINGLE_FORM else compare_logits(logits(every - {name}), base).max
        for name in names
    }
    fast, aligned = compare_logits(logits(none), expected), compare_logits(base, expected)
    return LogitComparison(fast, aligned, first, sources, routes[every])
