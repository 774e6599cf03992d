"""What context parallelism sends in its two ways, and the choice of `--cp-comm-type auto`."""

from __future__ import annotations

import dataclasses
import math

from patch.config import RunConfig
from patch.config.choices import ContextCommunication
from patch.plan.parameters import element_bytes

SHORTEST_PIECE = 4096
"""Tokens of a rank with CP: shorter pieces do not hide what travels."""
_FP32 = 4
_MIB = 2**20


def sent_bytes(config: RunConfig, way: ContextCommunication) -> int:
    """Bytes that a rank sends for one layer and micro-batch, forward and backward together.

    p2p: keys and values go to CP - 1 ranks in forward and again in backward, with their fp32 gradients.
    a2a: queries, keys, values and the result, and the gradients of each, less the share that stays. Key and
    value heads that CP does not divide are repeated.
    """
    model, parallel, training = config.model, config.parallel, config.training
    tp_size, cp_size = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    heads, groups = model.num_attention_heads // tp_size, model.num_query_groups // tp_size
    size = element_bytes(training.precision)
    channels = model.kv_channels * training.micro_batch_size * config.sample_length // cp_size
    if way == "p2p":
        return 2 * groups * channels * (2 * size + _FP32) * (cp_size - 1)
    exchanged = 2 * (heads + math.lcm(groups, cp_size)) * channels
    return 2 * size * exchanged * (cp_size - 1) // cp_size


def resolve_cp_comm_type(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """Replace `auto` by the way that suits the run; without context parallelism there is nothing to choose.

    It is a2a where CP divides the query heads of a TP rank and either a2a sends no more, or sequences are
    packed or have a window: then most of what travels around a ring is for ranks that do not need it, and
    the work of the ranks is not even. Otherwise it is p2p, which hides what it sends behind attention.

    Returns:
        the run with a way instead of auto, and a line about the choice.
    """
    parallel = config.parallel
    if parallel.cp_comm_type is not None or parallel.context_parallel_size == 1:
        return config, []
    model, data = config.model, config.data
    heads = model.num_attention_heads // parallel.tensor_model_parallel_size
    sent = {way: sent_bytes(config, way) for way in ("p2p", "a2a")}
    has_parts = data.packing or data.reset_attention_mask or model.window_size is not None
    is_possible = config.heads_divide_by_cp
    chosen: ContextCommunication = "p2p"
    if is_possible and (has_parts or sent["a2a"] <= sent["p2p"]):
        chosen = "a2a"
    a2a = f"a2a {sent['a2a'] / _MIB:.1f} MiB" if is_possible else f"a2a cannot share {heads} heads"
    line = (
        f"--cp-comm-type auto: for a layer and micro-batch a rank sends by p2p {sent['p2p'] / _MIB:.1f} MiB, "
        f"by {a2a}; {chosen} is chosen"
    )
    resolved = dataclasses.replace(parallel, cp_comm_type=chosen)
    return dataclasses.replace(config, parallel=resolved), [line]
