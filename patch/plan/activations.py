"""Bytes that activations take: what a layer keeps for its backward, and the most on each pipeline rank.

The most is over all passes of a step (pipeline.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from patch.config import RunConfig
from patch.config.choices import PRECISIONS, Recompute
from patch.families import Kind, WeightRow, attended_channels, traits_of, widths
from patch.families.adapters import adapters_of, are_experts_single
from patch.layout import chunk_length
from patch.layout.pipeline_stages import stage_activations
from patch.plan.parameters import by_layer, element_bytes, matrices_per_rank
from patch.plan.pipeline import Moment, Schedule, moments

_HALF = 2
_FP32 = 4


class ActivationPeak(NamedTuple):
    """Bytes of one process at its worst moment."""

    layers: int
    """Bytes that layers keep for backward, of all micro-batches in flight."""
    ends: int
    """Bytes that the last norm and the loss keep, and interleaved stages of their outputs."""
    transient: int
    """Bytes that the pass itself allocates, with messages between stages."""
    in_flight: int
    """Micro-batches in flight, counted in each stage of the process."""
    on_host: int
    """Bytes of offloaded layers, in host memory."""

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return self.layers + self.ends + self.transient


class _StageBytes(NamedTuple):
    """Bytes of one micro-batch in one pipeline stage."""

    layers: int
    """Kept by the layers from forward to backward."""
    ends: int
    """Kept besides."""
    forward: int
    """Allocated by forward at its worst moment, beyond what is kept."""
    backward: int
    """The same of backward."""
    embedding: int
    """The gradient of the embedding's weight, when nothing else of the micro-batch is left."""
    on_host: int
    """Offloaded layers."""


def activation_peak(config: RunConfig, pp_rank: int, *, cuda: bool) -> ActivationPeak:
    """Activations of a process of this pipeline rank."""
    schedule = Schedule.of(config)
    stages = tuple(
        _stage_bytes(config, chunk * schedule.pp_size + pp_rank, cuda=cuda)
        for chunk in range(schedule.vp_size)
    )
    return _peak(schedule, pp_rank, stages)


@lru_cache(maxsize=4096)  # a search asks for many runs that differ in their optimizer alone
def _peak(schedule: Schedule, pp_rank: int, stages: tuple[_StageBytes, ...]) -> ActivationPeak:
    peaks = (peak for moment in moments(schedule, pp_rank) for peak in _peaks_of(moment, stages))
    return max(peaks, key=lambda peak: (peak.total, peak.in_flight))


def _peaks_of(moment: Moment, stages: Sequence[_StageBytes]) -> Iterator[ActivationPeak]:
    """The worst moments of one pass."""
    counts, own = moment.in_flight, stages[moment.chunk]
    held = list(zip(counts, stages, strict=True))
    layers = sum(count * stage.layers for count, stage in held)
    ends = sum(count * stage.ends for count, stage in held)
    on_host = sum(count * stage.on_host for count, stage in held)
    transient = own.forward if moment.is_forward else own.backward
    yield ActivationPeak(layers, ends, transient, sum(counts), on_host)
    if not moment.is_forward and own.embedding:
        yield ActivationPeak(
            layers - own.layers, ends - own.ends, own.embedding, sum(counts) - 1, on_host - own.on_host
        )


def _stage_bytes(config: RunConfig, stage: int, *, cuda: bool) -> _StageBytes:
    """Bytes of one micro-batch in a pipeline stage."""
    model, size = config.model, element_bytes(config.training.precision)
    tp_size, last = config.parallel.tensor_model_parallel_size, len(config.stage_layers) - 1
    tokens, boundary = config.micro_batch_tokens, boundary_bytes(config)
    layers = _layers_of(config, stage, cuda=cuda)
    ends, forward = _rope_table_bytes(config) if layers else 0, 0
    # What a norm gives is the input of the next operation, which counts it.
    of_norm, is_adapted = tokens * _norm_bytes(config, cuda=cuda), config.adapter.lora_rank is not None
    if stage == 0 and traits_of(model).embedding_norm and not is_adapted:
        ends += of_norm
    if stage == last:
        of_loss, forward = _loss_bytes(config, cuda=cuda)
        ends += of_loss + of_norm
    elif config.virtual_pipeline_size > 1:  # only 1F1B frees them once they are sent
        ends += boundary
    travelling = 2 * boundary if last else 0
    if config.adapter.quantize_base:  # a product's weight is dense
        travelling += max(matrices_per_rank(config)) * size
    rows, is_summed = config.padded_vocab_size // tp_size, _sums_in_float32(config, cuda=cuda)
    return _StageBytes(
        layers=sum(layer.kept for layer in layers),
        ends=ends,
        forward=forward + travelling,
        backward=_backward(layers) + travelling,
        embedding=rows * model.hidden_size * size if stage == 0 and not (is_adapted or is_summed) else 0,
        on_host=sum(layer.on_host for layer in layers),
    )


def _gradient_bytes(config: RunConfig, *, cuda: bool) -> int:
    """Bytes that the backward of a layer's MLP or experts allocates."""
    model, size, tokens = config.model, element_bytes(config.training.precision), config.micro_batch_tokens
    tp_size = config.parallel.tensor_model_parallel_size
    # The gradients of gate and up; with SP the MLP's gathered input and its gradient.
    gradients = int(tokens * widths(model, "mlp", tp_size).given * size)
    gradients += 2 * tokens * model.hidden_size * size if config.parallel.sequence_parallel else 0
    if model.num_experts:  # what experts take and give; their activation again, its gradient, their product
        # On a CPU one expert after the other has them; layers of their own have kept half of it.
        is_one = are_experts_single(model, config.adapter)
        share = config.experts.expert_model_parallel_size / model.num_experts if is_one or not cuda else 1
        again = model.expert_width // config.etp_size * ((0 if is_one else 2 * size) + _FP32) * share
        at_once = model.hidden_size * size * (1 if is_one else 2)
        gradients += int(dispatch_of(config).rows * (at_once + again))
        gradients -= int((1 - share) * tokens * widths(model, "expert", tp_size).given * size)
    return gradients


class _LayerBytes(NamedTuple):
    kept: int
    """On the device from forward to backward."""
    back: int
    """Further bytes in its own backward: recomputed, copied back from the host, allocated."""
    on_host: int = 0


def _layers_of(config: RunConfig, stage: int, *, cuda: bool) -> list[_LayerBytes]:
    """The layers of a stage, or its blocks of recomputed layers, in the order of forward."""
    training, num_layers = config.training, config.stage_layers[stage]
    boundary = boundary_bytes(config)
    granularity: Recompute | None = "selective" if config.recompute == "selective" else None

    def measure(run: RunConfig, *, is_first: bool = False) -> tuple[_LayerBytes, int]:
        of_layer = activation_bytes(run, cuda=cuda, is_first=is_first)
        return _LayerBytes(of_layer[None], _gradient_bytes(run, cuda=cuda)), of_layer[granularity]

    layers = by_layer(config, measure)[stage]
    adapted = [each.base.layers[0] for each in adapters_of(config.model, config.adapter)]
    if adapted and stage == 0 and training.recompute_granularity is None:  # else the embedding has a gradient
        first, of_first = min(adapted), by_layer(config, partial(measure, is_first=True))[0]
        before = [(_LayerBytes(0, 0), 0)] * min(first, num_layers)
        layers = [*before, *of_first[first : first + 1], *layers[first + 1 :]]
    if config.recompute == "full" and training.recompute_method == "uniform":
        size, wholes = training.recompute_num_layers, [whole for whole, _ in layers]
        blocks = (wholes[end - size : end] for end in range(size, num_layers + 1, size))
        again = (sum(whole.kept for whole in block) + _backward(block) for block in blocks)
        return [_LayerBytes(boundary, back - boundary) for back in again]
    split = stage_activations(num_layers, training)
    found = []
    for index, ((whole, gradients, _), kept) in enumerate(layers):
        if index < split.offloaded:  # two are on the device at once, of which one is copied
            back, on_host = min(2, split.offloaded) * kept + whole - kept, kept
            found.append(_LayerBytes(0, back + gradients, on_host))
        else:
            stays = boundary if index < split.computed_again.stop else kept
            found.append(_LayerBytes(stays, whole - stays + gradients))
    if split.offloaded and stage:  # what the stage before has sent stays
        found[0] = found[0]._replace(kept=boundary, on_host=found[0].on_host - boundary)
    return found


def _backward(layers: list[_LayerBytes]) -> int:
    """The most bytes of these layers that exist during backward beyond what they keep in all."""
    most, freed = 0, 0
    for layer in reversed(layers):
        most = max(most, layer.back - freed)
        freed += layer.kept
    return most


def _sums_in_float32(config: RunConfig, *, cuda: bool) -> bool:
    """Whether the vocabulary's gradients are added to the main gradients, without a tensor of their type."""
    return cuda and config.optimizer.gradient_accumulation_fusion is not False


def _loss_bytes(config: RunConfig, *, cuda: bool) -> tuple[int, int]:
    """Bytes of the loss without logits (not `--precision-align`, which has all logits).

    Args:
        config: the run.
        cuda: whether it runs on GPUs, where Triton's kernels need no float32 copy of a chunk's logits. A CPU
            adds another type to the sum through such a copy.
    Returns:
        bytes of one micro-batch: gradients of hidden states and weight, until the loss's backward; and a
        chunk of logits with the float32 sum of the weight's gradient if that is rounded, until the loss is
        known.
    """
    training, hidden = config.training, config.model.hidden_size
    rows = config.padded_vocab_size // config.parallel.tensor_model_parallel_size
    tokens = config.micro_batch_tokens
    size = element_bytes(training.precision)
    chunk = chunk_length(rows, hidden, cuda=cuda)
    logits = min(chunk, tokens) * rows * (size if cuda or size == _FP32 else size + _FP32)
    has_sum = chunk < tokens and size != _FP32
    weight_sum = rows * hidden * _FP32 * (1 if cuda else 2) if has_sum else 0
    if config.adapter.lora_rank:  # the weight has no gradient
        return tokens * hidden * size, logits
    if _sums_in_float32(config, cuda=cuda):
        return tokens * hidden * size + rows * hidden * _FP32, logits
    return (tokens + rows) * hidden * size, logits + weight_sum


class Dispatch(NamedTuple):
    """How a micro-batch's tokens travel to the experts of a layer; their results travel back alike."""

    rows: float
    """Tokens that a rank's experts compute, each as often as it visits one of them; all experts alike."""
    sent: float
    """Bytes that a rank sends, one way."""
    words: str
    """The granularity, in words."""


def dispatch_of(config: RunConfig) -> Dispatch:
    """The way of tokens to experts. With SP each rank of a TP group sends its part, to all ETP ranks."""
    model, experts, etp_size = config.model, config.experts, config.etp_size
    parts = config.parallel.tensor_model_parallel_size if config.parallel.sequence_parallel else 1
    tokens, ep_size = config.micro_batch_tokens / parts, experts.expert_model_parallel_size
    of_token = model.hidden_size * element_bytes(config.training.precision)
    visits = tokens * model.moe_router_topk
    if experts.moe_token_dispatcher_type == "allgather":
        ranks = ep_size * etp_size
        words = f"all-gather over EP {ep_size} x ETP {etp_size}"
        return Dispatch(visits * etp_size, tokens * of_token * (ranks - 1), words)
    sent = visits * of_token * ((ep_size - 1) / ep_size + etp_size - 1)
    words = f"all-to-all over EP {ep_size}" + (f", all-gather over ETP {etp_size}" if etp_size > 1 else "")
    return Dispatch(visits * etp_size, sent, words)


class SavedBytes(NamedTuple):
    """Bytes of one token that a layer keeps for its backward, in the order of forward."""

    attention_norm: float
    qkv_input: float
    qkv: float
    attention_result: float
    mlp_norm: float
    mlp_input: float
    expert_input: float
    gate_up: float
    product: float

    def without(self, *names: str) -> SavedBytes:
        """The same with these at 0."""
        return self._replace(**dict.fromkeys(names, 0.0))


def activation_bytes(config: RunConfig, *, cuda: bool, is_first: bool = False) -> dict[Recompute | None, int]:
    """Bytes of one of equal layers and one micro-batch on one rank, by value of `recompute_granularity`.

    With `--recompute-method block`, "full" is that of the layers that are recomputed, None of the others.

    Not included: norms of heads, masks of a sliding window, the order of operations of Hugging Face
    (`--precision-align`), scales of 8-bit numbers and layers in bf16 beside them, packing (a CPU may keep
    attention's result twice), and what backward itself allocates (with `full`, all of a block of layers).

    Args:
        config: the run.
        cuda: whether the layer runs on a GPU. On a CPU torch's norm consists of several operations in fp32,
            which keep two more values for each element.
        is_first: it has the run's first adapters, before which nothing is kept.
    """
    training, size = config.training, element_bytes(config.training.precision)
    whole = selective = _saved_bytes(config, cuda=cuda)
    selective = selective.without("product")
    if cuda or size == _HALF:  # norms are recomputed
        given = whole.qkv_input
        selective = selective.without("qkv_input", "mlp_input")
        selective = selective._replace(attention_norm=given, mlp_norm=given)
    if config.adapter.lora_rank:
        whole, selective = _beside_adapters(config, whole, selective, is_first=is_first)
    # Of 8-bit products three keep their inputs in 8 bits: both norms' outputs, and the MLP's product.
    # Adapters keep them as they are, and weights that stay keep nothing.
    bytes_kept = size if config.adapter.lora_rank else PRECISIONS[training.precision].factor_bytes
    mlp = widths(config.model, "mlp", config.parallel.tensor_model_parallel_size)
    narrowed = (size - bytes_kept) * (2 * _own_hidden(config) + mlp.taken)
    layers_of_block = training.recompute_num_layers if training.recompute_method == "uniform" else 1
    of_adapters = _adapter_bytes(config)
    per_token: dict[Recompute | None, float] = {
        None: sum(whole) + of_adapters - narrowed,
        "selective": sum(selective) + of_adapters,
        "full": _own_hidden(config) * size / layers_of_block,
    }
    return {setting: int(config.micro_batch_tokens * num_bytes) for setting, num_bytes in per_token.items()}


def _saved_bytes(config: RunConfig, *, cuda: bool) -> SavedBytes:
    """Bytes that a layer without adapters keeps, nothing recomputed."""
    model, tp_size = config.model, config.parallel.tensor_model_parallel_size
    size, norm = element_bytes(config.training.precision), _norm_bytes(config, cuda=cuda)
    given, mlp = _own_hidden(config) * size, widths(model, "mlp", tp_size)
    of_experts = size * widths(model, "expert", tp_size).taken  # computed again
    inputs = 0.0
    if model.num_experts:
        inputs = size * dispatch_of(config).rows * model.hidden_size / config.micro_batch_tokens
    if are_experts_single(model, config.adapter):
        inputs += 2 * of_experts  # their product, and what it is with its weight: not computed again
    result = size * model.value_channels * model.num_attention_heads // tp_size
    return SavedBytes(
        attention_norm=norm,
        qkv_input=given,
        qkv=_attention_bytes(config, cuda=cuda) - result,
        attention_result=result,
        mlp_norm=norm,
        mlp_input=given,
        expert_input=inputs,
        gate_up=size * mlp.given,
        product=size * mlp.taken - of_experts,
    )


def _beside_adapters(
    config: RunConfig, whole: SavedBytes, selective: SavedBytes, *, is_first: bool
) -> tuple[SavedBytes, SavedBytes]:
    """Drop the inputs of products whose weights stay and have no adapter."""
    taken = {_input_of(each.base) for each in adapters_of(config.model, config.adapter)}
    others = {"qkv_input", "mlp_input", "product"} - (set() if config.adapter.lora_dropout else taken)
    others -= {"mlp_input"} if config.model.num_experts else set()  # a router keeps its input
    selective = selective.without(*others)
    if config.recompute != "selective":  # which computes them again for nothing
        whole = whole.without(*others)
    first = min(map(SavedBytes._fields.index, taken), default=0) if is_first else 0
    before = SavedBytes._fields[:first]
    return whole.without(*before), selective.without(*before)


def _input_of(base: WeightRow) -> str:
    """The field of `SavedBytes` that is the input of a weight's product."""
    if base.kind is Kind.ROW_PARALLEL:
        return "attention_result" if base.part == "attention" else "product"
    return {"attention": "qkv_input", "expert": "expert_input"}.get(base.part, "mlp_input")


def _rope_table_bytes(config: RunConfig) -> int:
    """Cosines and sines of one micro-batch, which a stage's layers share; packed rows have their own."""
    if not traits_of(config.model).has_rope:
        return 0
    rows = config.training.micro_batch_size if config.is_packed else 1
    length = config.sample_length // config.parallel.context_parallel_size
    return _FP32 * rows * length * config.model.rotary_channels


def boundary_bytes(config: RunConfig) -> int:
    """Bytes of what a layer gives to the next one, of one micro-batch on one rank."""
    return config.micro_batch_tokens * _own_hidden(config) * element_bytes(config.training.precision)


def _adapter_bytes(config: RunConfig) -> float:
    """Bytes of one token: what each A gives; with dropout the input of each, and what became zero of it."""
    size, found, dropout = element_bytes(config.training.precision), 0.0, config.adapter.lora_dropout > 0
    tp_size, of_stream = config.parallel.tensor_model_parallel_size, _own_hidden(config)
    for each in adapters_of(config.model, config.adapter):
        is_of_expert = each.base.part == "expert"
        rank, taken = each.a.shard_shape(config.etp_size if is_of_expert else tp_size)
        if not is_of_expert and taken == config.model.hidden_size:  # with SP A takes a rank's own tokens
            taken = of_stream
        visits = each.base.active * each.base.num_experts * len(each.base.layers) / config.model.num_layers
        found += size * visits * (rank + dropout * 2 * taken)
    return found


def _own_hidden(config: RunConfig) -> int:
    """Hidden values of a token on one rank, averaged: SP cuts the tokens of what is outside of products."""
    parallel = config.parallel
    shares = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    return config.model.hidden_size // shares


def _norm_bytes(config: RunConfig, *, cuda: bool) -> int:
    """Bytes of one token: a norm's input and a sum; on a CPU RMSNorm has fp32 values, two if it trains."""
    size = element_bytes(config.training.precision)
    if traits_of(config.model).normalization == "LayerNorm":
        return _own_hidden(config) * size + 2 * _FP32
    on_cpu = _FP32 if config.adapter.lora_rank else 2 * _FP32
    return _own_hidden(config) * (size if cuda else on_cpu) + _FP32


def _attention_bytes(config: RunConfig, *, cuda: bool) -> float:
    """Bytes of one token: q and k after RoPE, v, the result and its fp32 sum.

    ALiBi widens all of them, latent attention v and the result, and both keep the result without these
    channels too. Norms of heads keep more. A ring
    keeps k and v as one message; all-to-all keeps what was exchanged: q, k, v of whole sequences, the result,
    and the result of all heads.
    """
    model, parallel = config.model, config.parallel
    tp_size, cp_size = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    heads, groups = model.num_attention_heads // tp_size, model.num_query_groups // tp_size
    kept = 2 * heads + 2 * groups
    if cp_size > 1 and parallel.cp_comm_type != "p2p":
        kept = 3 * heads + 2 * math.lcm(groups, cp_size)
    values = attended_channels(model) * kept
    if attended_channels(model) != model.value_channels:
        values += model.value_channels * heads
    return (
        element_bytes(config.training.precision) * values + _FP32 * heads + _latent_bytes(config, cuda=cuda)
    )


def _latent_bytes(config: RunConfig, *, cuda: bool) -> float:
    """Bytes of one token: the latents of queries, and of keys and values, before and after their norms."""
    model, parallel = config.model, config.parallel
    shares = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    size, found = element_bytes(config.training.precision), 0.0
    for rank, beside in ((model.q_lora_rank, 0), (model.kv_lora_rank, model.rotary_channels)):
        if rank is not None:
            found += rank * (2 * size if cuda else 2 * _FP32 + size) + beside * size + _FP32
    return found / shares
