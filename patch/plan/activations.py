"""Bytes of activations: what a layer keeps for backward, and the peak of each pipeline rank.

The peak is taken over all passes of a step (pipeline.py).
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import NamedTuple

from patch.config import RunConfig
from patch.config.choices import PRECISIONS, Recompute
from patch.families import Kind, ModelConfig, WeightRow, attended_channels, traits_of, widths
from patch.families.adapters import adapters_of, are_experts_single
from patch.layout import chunk_length, keeps_logits
from patch.layout.pipeline_stages import stage_activations
from patch.plan.parameters import by_layer, element_bytes, matrices_per_rank
from patch.plan.pipeline import Schedule, moments
from patch.storage.teacher_store import known_header

_HALF = 2
_FP32 = 4


class ActivationPeak(NamedTuple):
    """Bytes of one rank at the peak of a step."""

    layers: int
    """Bytes that layers keep for backward, of all micro-batches in flight."""
    ends: int
    """Bytes that the last norm and the loss keep, and the outputs that interleaved stages keep."""
    transient: int
    """Bytes that the running pass allocates, messages between stages included."""
    in_flight: int
    """Micro-batches in flight, summed over the rank's virtual stages."""
    on_host: int

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return self.layers + self.ends + self.transient


class _StageBytes(NamedTuple):
    """Bytes of one micro-batch in one pipeline stage."""

    layers: int
    ends: int
    """Kept outside of the layers."""
    on_host: int
    forward: int
    """Peak allocation of forward beyond the kept bytes."""
    backward: int
    """Peak allocation of backward beyond the kept bytes."""
    embedding: int
    """Gradient of the embedding's weight, allocated when the micro-batch holds nothing else."""


def activation_peak(config: RunConfig, pp_rank: int, *, cuda: bool) -> ActivationPeak:
    """Return the peak of the activations on a pipeline rank."""
    schedule = Schedule.of(config)
    stages = tuple(
        _stage_bytes(config, chunk * schedule.pp_size + pp_rank, cuda=cuda)
        for chunk in range(schedule.vp_size)
    )
    return _peak(schedule, pp_rank, stages)


@lru_cache(maxsize=4096)  # a search asks for many runs that differ in their optimizer alone
def _peak(schedule: Schedule, pp_rank: int, stages: tuple[_StageBytes, ...]) -> ActivationPeak:
    found = []
    for is_forward, chunk, counts in moments(schedule, pp_rank):
        own, total = stages[chunk], sum(counts)
        held = list(zip(counts, stages, strict=True))
        layers, ends, on_host = (sum(count * stage[field] for count, stage in held) for field in range(3))
        transient = own.forward if is_forward else own.backward
        found.append(ActivationPeak(layers, ends, transient, total, on_host))
        if not is_forward and own.embedding:
            others = layers - own.layers, ends - own.ends
            found.append(ActivationPeak(*others, own.embedding, total - 1, on_host - own.on_host))
    return max(found, key=lambda peak: (peak.total, peak.in_flight))


def _stage_bytes(config: RunConfig, stage: int, *, cuda: bool) -> _StageBytes:
    model, size = config.model, element_bytes(config.training.precision)
    tp_size, last = config.parallel.tensor_model_parallel_size, len(config.stage_layers) - 1
    tokens, boundary = config.micro_batch_tokens, boundary_bytes(config)
    layers = _layers_of(config, stage, cuda=cuda)
    ends, forward = _rope_table_bytes(config) if layers else 0, 0
    # A norm's output is the input of the next operation, which counts it.
    of_norm, is_adapted = tokens * _norm_bytes(config, cuda=cuda), config.adapter.is_on
    if stage == 0 and traits_of(model).embedding_norm and not is_adapted:
        ends += of_norm
    if stage == last:
        of_loss, forward = _loss_bytes(config, cuda=cuda)
        ends += of_loss + of_norm
    elif config.virtual_pipeline_size > 1:  # only 1F1B frees them once they are sent
        ends += boundary
    in_flight = 2 * boundary if last else 0
    if config.adapter.quantize_base:  # a product's weight is dense
        in_flight += max(matrices_per_rank(config)) * size
    rows = config.padded_vocab_size // tp_size
    is_summed = cuda and config.optimizer.fuses_gradients(cuda=cuda)
    has_gradient = stage == 0 and not (is_adapted or is_summed)
    table = rows * model.hidden_size * size
    backward = _backward(layers)
    if stage == last and model.normalize_output_weight:
        forward += table
        if not is_adapted:  # norms of rows stay; autograd has four tables at once
            ends, backward = ends + 2 * rows * size, max(backward, 4 * table)
    kept, on_host = sum(layer.kept for layer in layers), sum(layer.on_host for layer in layers)
    embedding = table * has_gradient
    return _StageBytes(kept, ends, on_host, forward + in_flight, backward + in_flight, embedding)


def _gradient_bytes(config: RunConfig, *, cuda: bool) -> int:
    model, size, tokens = config.model, element_bytes(config.training.precision), config.micro_batch_tokens
    tp_size = config.parallel.tensor_model_parallel_size
    # The gradients of gate and up; with SP the MLP's gathered input and the gradient of this input.
    # In chunks, backward has them, and recomputes their forward, for one chunk.
    mlp, num_chunks = widths(model, "mlp", tp_size), config.training.mlp_chunks_for_training
    at_once = mlp.out_features + (sum(mlp) if num_chunks > 1 else 0)
    gradients = int(tokens * at_once * size / num_chunks)
    if num_chunks > 1:  # autograd adds up a gradient, or its dummy, of each chunk
        gradients += int(model.hidden_size * mlp.out_features * size)
    gradients += 2 * tokens * model.hidden_size * size if config.parallel.sequence_parallel else 0
    if model.num_experts:  # inputs and outputs of experts; recomputed activation, its gradient, the product
        # On a CPU only one expert at a time has them; single experts have already kept half.
        is_one = are_experts_single(model, config.adapter)
        share = config.experts.expert_model_parallel_size / model.num_experts if is_one or not cuda else 1
        again = model.expert_width // config.etp_size * ((0 if is_one else 2 * size) + _FP32) * share
        at_once = model.hidden_size * size * (1 if is_one else 2)
        gradients += int(dispatch_of(config).rows * (at_once + again))
        gradients -= int((1 - share) * tokens * widths(model, "expert", tp_size).out_features * size)
    return gradients


class _LayerBytes(NamedTuple):
    kept: int
    """On the device from forward to backward."""
    back: int
    """Further bytes in the layer's backward: recomputed, copied back from the host, allocated."""
    on_host: int = 0


def _layers_of(config: RunConfig, stage: int, *, cuda: bool) -> list[_LayerBytes]:
    """Bytes of a stage's layers, or of its blocks of recomputed layers, in the order of forward."""
    training, num_layers = config.training, config.stage_layers[stage]
    boundary = boundary_bytes(config)

    def measure(run: RunConfig, *, is_first: bool = False) -> tuple[_LayerBytes, int]:
        whole = activation_bytes(run, cuda=cuda, is_first=is_first)[None]
        gradients = _gradient_bytes(run, cuda=cuda)
        return _LayerBytes(whole, gradients), kept_bytes(run, cuda=cuda, is_first=is_first)

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
        if index < split.offloaded:  # two layers are on the device at once: one computes, one is copied
            back, on_host = min(2, split.offloaded) * kept + whole - kept, kept
            found.append(_LayerBytes(0, back + gradients, on_host))
        else:
            stays = boundary if index < split.computed_again.stop else kept
            found.append(_LayerBytes(stays, whole - stays + gradients))
    if split.offloaded and stage:  # the input from the previous stage stays on the device
        found[0] = found[0]._replace(kept=boundary, on_host=found[0].on_host - boundary)
    return found


def _backward(layers: list[_LayerBytes]) -> int:
    """Peak bytes of backward beyond the bytes that the layers keep in total."""
    most, freed = 0, 0
    for layer in reversed(layers):
        most = max(most, layer.back - freed)
        freed += layer.kept
    return most


def _loss_bytes(config: RunConfig, *, cuda: bool) -> tuple[int, int]:
    """Bytes of one micro-batch's loss: gradients until its backward; a chunk's logits and sums in forward.

    Not for `--precision-align`, which has all logits. On GPUs Triton's kernels need no float32 copy of a
    chunk's logits. A loss with a teacher needs one, one at the temperature, and the teacher's numbers.
    A CPU accumulates another dtype through a float32 copy of the weight's gradient.
    """
    training, hidden = config.training, config.model.hidden_size
    rows = config.padded_vocab_size // config.parallel.tensor_model_parallel_size
    tokens = config.micro_batch_tokens
    size = element_bytes(training.precision)
    chunk = chunk_length(rows, hidden, cuda=cuda)
    is_taught = config.data.distill_from is not None
    is_wide = size != _FP32 and (is_taught or not cuda)
    logits = min(chunk, tokens) * rows * (size + _FP32 * (is_wide + is_taught))
    if is_taught and (header := known_header(str(config.data.distill_from))):
        logits += tokens * header.token_bytes
    has_sum = chunk < tokens and size != _FP32
    weight_sum = rows * hidden * _FP32 * (1 if cuda else 2) if has_sum else 0
    if config.adapter.is_on:  # the weight has no gradient
        return tokens * hidden * size, logits
    fuses = cuda and config.optimizer.fuses_gradients(cuda=cuda)
    if fuses and not config.model.normalize_output_weight:  # no temporary tensor
        if keeps_logits(tokens, hidden, size):
            narrow = min(chunk, tokens) * rows * size
            return tokens * (2 * hidden + rows) * size, logits - narrow
        return tokens * hidden * size + rows * hidden * _FP32, logits
    return (tokens + rows) * hidden * size, logits + weight_sum


class Dispatch(NamedTuple):
    """Dispatch of a micro-batch's tokens to the experts of a layer; results return in the same way."""

    rows: float
    """Tokens that a rank's experts compute, counted once per visited expert; experts have equal load."""
    sent: float
    """Bytes that a rank sends in one direction."""
    words: str


def dispatch_of(config: RunConfig) -> Dispatch:
    """Return the dispatch to experts. With SP each rank of a TP group sends its tokens to all ETP ranks."""
    model, experts, etp_size = config.model, config.experts, config.etp_size
    tokens, ep_size = config.micro_batch_tokens / config.sp_size, experts.expert_model_parallel_size
    of_token = model.hidden_size * element_bytes(config.training.precision)
    visits = tokens * model.moe_router_topk
    if experts.moe_token_dispatcher_type == "allgather":
        ranks = ep_size * etp_size
        words = f"all-gather over EP {ep_size} x ETP {etp_size}"
        return Dispatch(visits * etp_size, tokens * of_token * (ranks - 1), words)
    sent = visits * of_token * ((ep_size - 1) / ep_size + etp_size - 1)
    words = f"all-to-all over EP {ep_size}" + (f", all-gather over ETP {etp_size}" if etp_size > 1 else "")
    return Dispatch(visits * etp_size, sent, words)


def activation_bytes(config: RunConfig, *, cuda: bool, is_first: bool = False) -> dict[Recompute | None, int]:
    """Return bytes per rank of one layer and micro-batch, by `recompute_granularity`; all layers are equal.

    With `--recompute-method block`, "full" holds for the recomputed layers, None for the other layers. Not
    included are masks of a sliding window, and `--precision-align`. Scales of casts, and layers
    without casts beside others, are not included. Neither are packing (a CPU may keep the attention output
    twice) and allocations of backward.

    Args:
        cuda: whether the layer runs on a GPU. A CPU's RMSNorm keeps two more fp32 values per element.
        is_first: whether the layer has the run's first adapters, before which nothing is kept.
    """
    training, size = config.training, element_bytes(config.training.precision)
    whole = saved_bytes(config, cuda=cuda)
    selective, placement = whole | {"product": 0.0, "gate": 0.0}, traits_of(config.model).norm_placement
    if (cuda or size == _HALF) and placement != "behind":  # norms are recomputed
        given, behind = whole["qkv_input"], whole["attention_norm"] / 2 if placement == "both" else 0.0
        selective |= {"qkv_input": 0.0, "mlp_input": 0.0}
        selective |= dict.fromkeys(("attention_norm", "mlp_norm"), given + behind)
    if config.adapter.is_on:
        whole, selective = _beside_adapters(config, whole, selective, is_first=is_first)
    # Three products that cast their inputs keep the casts: of both norms' outputs, and the MLP's product.
    # Adapters keep these inputs unchanged, and frozen weights keep nothing.
    bytes_kept = size if config.adapter.is_on else PRECISIONS[training.precision].factor_bytes
    mlp = widths(config.model, "mlp", config.parallel.tensor_model_parallel_size)
    narrowed = (size - bytes_kept) * (2 * _own_hidden(config) + mlp.in_features)
    layers_of_block = training.recompute_num_layers if training.recompute_method == "uniform" else 1
    of_adapters = _adapter_bytes(config)
    per_token: dict[Recompute | None, float] = {
        None: sum(whole.values()) + of_adapters - narrowed,
        "selective": sum(selective.values()) + of_adapters,
        "full": _own_hidden(config) * size / layers_of_block,
    }
    return {setting: int(config.micro_batch_tokens * num_bytes) for setting, num_bytes in per_token.items()}


def kept_bytes(config: RunConfig, *, cuda: bool, is_first: bool = False) -> int:
    """Return `activation_bytes` of a layer of this run that is not recomputed as a whole."""
    setting: Recompute | None = "selective" if config.recompute == "selective" else None
    return activation_bytes(config, cuda=cuda, is_first=is_first)[setting]


def saved_bytes(config: RunConfig, *, cuda: bool) -> dict[str, float]:
    """Return bytes of a token that a layer without adapters keeps, in the order of forward; AC=none."""
    model, tp_size = config.model, config.parallel.tensor_model_parallel_size
    size, norm = element_bytes(config.training.precision), _norm_bytes(config, cuda=cuda)
    given, mlp, traits = _own_hidden(config) * size, widths(model, "mlp", tp_size), traits_of(model)
    is_both, has_gate = traits.norm_placement == "both", traits.gated_linear_unit
    has_gate = has_gate and traits.activation != "silu"
    of_experts = size * widths(model, "expert", tp_size).in_features  # computed again
    is_chunked, inputs = config.training.mlp_chunks_for_training > 1, 0.0
    if model.num_experts:
        inputs = size * dispatch_of(config).rows * model.hidden_size / config.micro_batch_tokens
    if are_experts_single(model, config.adapter):
        inputs += 2 * of_experts  # the product, without and with the router's weight: not recomputed
    result = size * model.value_channels * model.num_attention_heads // tp_size
    return {
        "attention_norm": norm + is_both * norm,
        "qkv_input": given,
        "qkv": _attention_bytes(config, cuda=cuda) - result,
        "attention_result": result,
        "mlp_norm": norm + is_both * norm,
        "mlp_input": given,
        "router": _router_bytes(model) / config.sp_size,
        "expert_input": inputs,
        "gate_up": 0.0 if is_chunked else size * mlp.out_features,
        "gate": size * mlp.out_features / 2 if has_gate and not is_chunked else 0.0,  # its activation
        "product": 0.0 if is_chunked else size * mlp.in_features - of_experts,
    }


def _router_bytes(model: ModelConfig) -> int:
    """Bytes of a token in a router: float32 scores, and numbers and weights of its choices, at EP 1."""
    visits = model.moe_router_topk
    if not model.num_experts:
        return 0
    if model.moe_router_score_function == "sigmoid":  # divided by their sum; groups keep a mask's number
        return _FP32 * (model.num_experts + 8 * visits + 1 + (model.moe_router_num_groups is not None))
    if model.moe_router_pre_softmax:
        return _FP32 * (model.num_experts + 7 * visits)
    return _FP32 * 8 * visits


def _beside_adapters(
    config: RunConfig, whole: dict[str, float], selective: dict[str, float], *, is_first: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """Drop the inputs of products whose frozen weights have no adapter."""
    taken = {_input_of(each.base) for each in adapters_of(config.model, config.adapter)}
    others = {"qkv_input", "mlp_input", "product"} - (set() if config.adapter.lora_dropout else taken)
    if config.model.num_experts or config.training.mlp_chunks_for_training > 1:
        others -= {"mlp_input"}  # a router keeps its input, as does an MLP that backward recomputes
    names = [*whole]
    before = names[: min(map(names.index, taken), default=0)] if is_first else ()
    dropped = dict.fromkeys([*others, *before], 0.0)
    # AC=sel recomputes the inputs needlessly.
    of_whole = dict.fromkeys(before, 0.0) if config.recompute == "selective" else dropped
    return whole | of_whole, selective | dropped


def _input_of(base: WeightRow) -> str:
    if base.kind is Kind.ROW_PARALLEL:
        return "attention_result" if base.part == "attention" else "product"
    return {"attention": "qkv_input", "expert": "expert_input"}.get(base.part, "mlp_input")


def _rope_table_bytes(config: RunConfig) -> int:
    """Cosines and sines of one micro-batch, shared by a stage's layers; packed rows have their own."""
    if not traits_of(config.model).has_rope:
        return 0
    rows = config.training.micro_batch_size if config.is_packed else 1
    length = config.sample_length // config.parallel.context_parallel_size
    tables = 1 + any(getattr(config.model, name) for name in ("rotary_base_local", "llama_4_scaling_beta"))
    return _FP32 * rows * length * config.model.rotary_channels * tables


def boundary_bytes(config: RunConfig) -> int:
    """Return the bytes of the hidden states between two layers, of one micro-batch on one rank."""
    return config.micro_batch_tokens * _own_hidden(config) * element_bytes(config.training.precision)


def _adapter_bytes(config: RunConfig) -> float:
    """Bytes of one token: the output of each A; with dropout also each input, before and after dropout."""
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
    """Hidden values of a token on one rank, averaged: SP cuts the tokens outside of products."""
    return config.model.hidden_size // config.sp_size


def _norm_bytes(config: RunConfig, *, cuda: bool) -> int:
    """Bytes of one token: a norm's input and a sum; a CPU's RMSNorm keeps fp32 values, two if it trains."""
    size = element_bytes(config.training.precision)
    if traits_of(config.model).normalization == "LayerNorm":
        return _own_hidden(config) * size + 2 * _FP32
    on_cpu = _FP32 if config.adapter.is_on else 2 * _FP32
    on_gpu = _FP32 if traits_of(config.model).layernorm_zero_centered_gamma else size
    return _own_hidden(config) * (on_gpu if cuda else on_cpu) + _FP32


def _attention_bytes(config: RunConfig, *, cuda: bool) -> float:
    """Bytes of one token: q and k after RoPE, v, the output and its fp32 sum; what norms of heads keep.

    ALiBi widens all of them, latent attention widens v and the output; both also keep the output at its own
    width. A ring keeps k and v as one message. All-to-all keeps q, k, v and output of whole sequences, and
    the output of all heads.
    """
    model, parallel = config.model, config.parallel
    tp_size, cp_size = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    heads, groups = model.num_attention_heads // tp_size, model.num_query_groups // tp_size
    kept = 2 * heads + 2 * groups
    if cp_size > 1 and parallel.cp_comm_type != "p2p":
        kept = 3 * heads + 2 * math.lcm(groups, cp_size)
    values, size = attended_channels(model) * kept, element_bytes(config.training.precision)
    if attended_channels(model) != model.value_channels:
        values += model.value_channels * heads
    sums = 0 if model.attn_logit_softcapping else _FP32 * heads
    return size * values + sums + _head_norm_bytes(config, cuda=cuda) + _latent_bytes(config, cuda=cuda)


def _head_norm_bytes(config: RunConfig, *, cuda: bool) -> float:
    """Bytes of one token: queries and keys before their norms, and sums; a CPU keeps two fp32 values."""
    model, traits = config.model, traits_of(config.model)
    if not traits.qk_layernorm:
        return 0.0
    heads, is_each = model.num_attention_heads + model.num_query_groups, traits.qk_norm_of == "head"
    tp_size, of_channel = config.parallel.tensor_model_parallel_size, 2 * _FP32
    if cuda and is_each:
        is_wide = traits.layernorm_zero_centered_gamma
        of_channel = _FP32 if is_wide else element_bytes(config.training.precision)
    return heads * model.kv_channels * of_channel / tp_size + _FP32 * (heads / tp_size if is_each else 2)


def _latent_bytes(config: RunConfig, *, cuda: bool) -> float:
    """Bytes of one token: latents of queries, and of keys and values, before and after their norms."""
    model, size, found = config.model, element_bytes(config.training.precision), 0.0
    for rank, beside in ((model.q_lora_rank, 0), (model.kv_lora_rank, model.rotary_channels)):
        if rank is not None:
            found += rank * (2 * size if cuda else 2 * _FP32 + size) + beside * size + _FP32
    return found / config.sp_size
