"""Seconds of one layer's forward and backward on one rank, of one micro-batch: what computes, and what waits.

A product takes as long as its FLOPs, or as its matrices' way through memory, if that is longer; small ones
reach less of the peak. Norms, residuals, RoPE and SwiGLU take as long as the bytes that their fused kernels
read and write. A layer takes at least as long as the host needs to start its kernels.
"""

from __future__ import annotations

from typing import NamedTuple

from patch.config import RunConfig
from patch.config.backends import can_send_in_pieces
from patch.config.choices import PRECISIONS, Precision, Recompute
from patch.families import Kind, attended_channels, layer_matrices, widths
from patch.families.adapters import adapters_of
from patch.plan.activations import activation_bytes, boundary_bytes, dispatch_of
from patch.plan.flops import attended_pairs
from patch.plan.parameters import element_bytes
from patch.plan.savings import changed, with_changes
from patch.plan.timing import communication as links
from patch.plan.timing.machine import Machine

HALF_REACHED = 256
"""A product whose smallest side is this long reaches half of what large ones do: an H100 has about 700
TFLOP/s with sides of 8192, 650 with 4096, 270 with 1024."""
HALF_ATTENTION = 768
"""The same of attention by the length of a sequence: FlashAttention-3 has 230 TFLOP/s forward at 512, 450 at
2048, 600 at 8192."""
BACKWARD_OF_ATTENTION = 2.5
"""FLOPs of its backward over those of its forward: five products, one of which computes the scores again."""
LAUNCHES = (25, 50)
"""Kernels of a layer's forward and backward with fused operations."""
_OF_PIECE = 6
"""Host cost of sending a piece of a product, in launches: a receive and a send in one batch, two
waits, its product. Assumed."""
_FP32 = 4


class LayerTime(NamedTuple):
    """Seconds of one pass through one layer."""

    products: float
    attention: float
    memory: float
    """Norms, residuals, RoPE and SwiGLU; casts to 8 bits."""
    tensor: float = 0.0
    """Messages of TP that nothing hides."""
    context: float = 0.0
    """Seconds of CP's messages."""
    experts: float = 0.0
    """Seconds of messages to experts and back."""
    launches: float = 0.0
    """Seconds in which the host starts all kernels, if that is longer than they take."""

    @property
    def waiting(self) -> float:
        """Seconds in which the device has no kernel to run."""
        return max(0.0, self.launches - (self.products + self.attention + self.memory))

    @property
    def total(self) -> float:
        """All together; the kernels, or the host that starts them."""
        computing = max(self.products + self.attention + self.memory, self.launches)
        return computing + self.tensor + self.context + self.experts


class LayerTimes(NamedTuple):
    """Seconds of one layer and micro-batch on one rank."""

    forward: LayerTime
    backward: LayerTime
    """Backward of a layer that keeps all its activations."""
    selective: float
    """Seconds that AC=sel adds to a backward."""
    offload: float
    """Seconds by which copies of an offloaded layer exceed the passes that hide them."""


def layer_times(config: RunConfig, machine: Machine) -> LayerTimes:
    """The seconds of one layer of a run whose layers are all alike."""
    if config.parallel.tp_comm_overlap is None or (machine.is_gpu and not can_send_in_pieces(config)):
        ways = tensor_ways(config, machine)
        config = with_tensor_overlap(config, ways[True] < ways[False] if ways else not machine.is_gpu)
    products, attention = _Products(config, machine), _attention(config, machine)
    reached, traffic = machine.reached, [num_bytes / machine.memory_rate for num_bytes in _traffic(config)]
    again = BACKWARD_OF_ATTENTION * reached.attention_forward / reached.attention_backward
    passes = []
    for place, (of_products, factor) in enumerate(((products.forward, 1.0), (products.backward, again))):
        is_forward = place == 0
        tensor, pieces = _tensor(config, machine, products, is_forward=is_forward)
        passes.append(
            LayerTime(
                products=of_products,
                attention=attention * factor,
                memory=traffic[place],
                tensor=tensor,
                context=_context(config, machine, attention * factor, is_forward=is_forward),
                experts=links.dispatch_seconds(config, machine),
                launches=machine.launch_seconds * (LAUNCHES[place] + _OF_PIECE * pieces),
            )
        )
    forward, backward = passes
    offload = _offload(config, machine, forward.total, backward.total)
    return LayerTimes(forward, backward, traffic[2], offload)


def with_tensor_overlap(config: RunConfig, overlaps: bool) -> RunConfig:
    """The same run with or without TP's messages in pieces of products."""
    return with_changes(config, (changed("parallel", tp_comm_overlap=overlaps),))


def tensor_ways(config: RunConfig, machine: Machine) -> dict[bool, float]:
    """Seconds of a layer without and with TP's messages in pieces; {} where a GPU's run has no such choice.

    Pieces hide messages, but cost smaller products, sums by kernels of their own and the host's time.
    """
    if not (machine.is_gpu and can_send_in_pieces(config)):
        return {}
    ways = {way: layer_times(with_tensor_overlap(config, way), machine) for way in (False, True)}
    return {way: times.forward.total + times.backward.total for way, times in ways.items()}


def product_seconds(
    machine: Machine, precision: Precision, sides: tuple[float, float, float], written: float
) -> float:
    """Seconds of a product of an m x k and a k x n matrix.

    Args:
        machine: where.
        precision: of the factors.
        sides: m, n and k.
        written: bytes of memory for each element of the result, read and written.
    """
    m, n, k = sides
    size, reached = PRECISIONS[precision].factor_bytes, machine.gemm_share(precision)
    reached *= machine.reached.sustained * min(sides) / (min(sides) + HALF_REACHED)
    memory = size * (m * k + k * n) + written * m * n
    return max(2 * m * n * k / (machine.peak_flops(precision) * reached), memory / machine.memory_rate)


_UNPACKING = 14
"""Bytes that making one number of 4 bits reads and writes, but for the number (four_bit_product.py)."""


class _Products:
    """Seconds of a layer's products, all and one by one, each with the tokens that use its matrix.

    TP sums the results of those numbered in `summed`, and cuts those of `cut`.
    """

    def __init__(self, config: RunConfig, machine: Machine) -> None:
        tokens = config.micro_batch_tokens
        precision = config.training.precision
        size = element_bytes(precision)
        # Weight gradients are added to the main gradients; without fusion they are written and read besides.
        given = config.optimizer.gradient_accumulation_fusion
        fused = machine.is_gpu if given is None else given
        main = element_bytes(config.optimizer.main_grads_dtype)
        added = 2 * main + (0 if fused else 2 * size)
        rows, tp_size = layer_matrices(config.model), config.parallel.tensor_model_parallel_size
        sides = [(1, tokens * row.active, *row.shard_shape(tp_size)) for row in rows]
        for index, row in enumerate(rows):
            if row.part == "expert":  # the loop of a rank over its own
                number = row.num_experts // config.experts.expert_model_parallel_size
                shape = row.shard_shape(config.etp_size)
                sides[index] = (number, dispatch_of(config).rows / number, *shape)
        self.sides, self.size = sides, size
        self.each = [t * product_seconds(machine, precision, (m, n, k), size) for t, m, n, k in sides]
        self.inputs = [t * product_seconds(machine, precision, (m, k, n), size) for t, m, n, k in sides]
        self.weights = [t * product_seconds(machine, precision, (n, k, m), added) for t, m, n, k in sides]
        over_tp = [index for index, row in enumerate(rows) if row.part not in ("expert", "router")]
        self.summed = [index for index in over_tp if rows[index].kind is Kind.ROW_PARALLEL]
        self.cut = [index for index in over_tp if index not in self.summed]
        self.forward, self.backward = sum(self.each), sum(self.inputs)
        if config.adapter.lora_rank:
            self.weights = [0.0] * len(rows)
        of_row = {row.name: own for row, own in zip(rows, sides, strict=True)}
        for adapter in adapters_of(config.model, config.adapter):
            times, own, *_ = of_row[adapter.base.name]
            parts = config.etp_size if adapter.base.part == "expert" else tp_size
            for out, into in (adapter.a.shard_shape(parts), adapter.b.shard_shape(parts)):
                once = times * product_seconds(machine, precision, (own, out, into), size)
                self.forward, self.backward = self.forward + once, self.backward + 2 * once
        self.backward += sum(self.weights)
        if config.adapter.quantize_base:
            made = sum(t * n * k for t, _, n, k in sides) * (_UNPACKING + size) / machine.memory_rate
            self.forward, self.backward = self.forward + made, self.backward + made


def _attention(config: RunConfig, machine: Machine) -> float:
    """Seconds of attention's forward."""
    model, parallel, training = config.model, config.parallel, config.training
    heads = model.num_attention_heads // parallel.tensor_model_parallel_size
    pairs = attended_pairs([config.sample_length], model.window_size) / parallel.context_parallel_size
    flops = 4 * heads * attended_channels(model) * pairs * training.micro_batch_size
    precision: Precision = "fp32" if training.precision == "fp32" else "bf16"
    is_ring = parallel.cp_comm_type == "p2p"
    length = config.sample_length / (parallel.context_parallel_size if is_ring else 1)
    reached = machine.reached.attention_forward * machine.reached.sustained
    rate = machine.peak_flops(precision) * reached
    return flops / (rate * length / (length + HALF_ATTENTION))


def _traffic(config: RunConfig) -> tuple[float, float, float]:
    """Bytes that the other kernels of a layer read and write: forward, backward, and what AC=sel repeats."""
    model, parallel, precision = config.model, config.parallel, config.training.precision
    tp_size = parallel.tensor_model_parallel_size
    hidden = model.hidden_size / (tp_size if parallel.sequence_parallel else 1)
    attention, mlp = widths(model, "attention", tp_size), widths(model, "mlp", tp_size)
    # q, k and v are read and written again: turned by RoPE, or widened by ALiBi.
    norms, residuals, rope, swiglu = 2 * 2 * hidden, 2 * 3 * hidden, 2 * attention.given, sum(mlp)
    forward = norms + residuals + rope + swiglu
    backward = 2 * 3 * hidden + residuals + rope + 2 * swiglu
    size = element_bytes(precision)
    if config.has_8_bits:  # each factor is read twice, for its largest value and its cast, and written
        inputs = 2 * model.hidden_size + attention.taken + mlp.taken
        forward += (2 * hidden + attention.taken + mlp.taken) * 5 / size
        backward += (inputs + attention.given + mlp.given) * 5 / size
    tokens = config.micro_batch_tokens
    return tokens * size * forward, tokens * size * backward, tokens * size * (norms + swiglu)


def _tensor(
    config: RunConfig, machine: Machine, products: _Products, *, is_forward: bool
) -> tuple[float, int]:
    """Seconds of TP's messages that nothing hides, and the number of pieces in which they are sent on a GPU.

    Forward gathers (SP) or receives a layer's input before two products and sums after two others. In
    backward what is sent for the first two is in flight while their weights' gradients are computed.
    `--tp-comm-overlap` sends pieces of the other products while one is computed.
    """
    parallel, summed, cut = config.parallel, products.summed, products.cut
    tp_size, is_cut = parallel.tensor_model_parallel_size, parallel.sequence_parallel
    if tp_size == 1:
        return 0.0, 0
    once = gather = links.summing_seconds(config, machine)
    if parallel.tp_comm_overlap:
        found = sorted(summed + cut) if is_cut else summed if is_forward else cut
        message = once if is_cut else 2 * once
        seconds = sum(_in_pieces(config, machine, products, n, message, is_forward=is_forward) for n in found)
        again = len(cut) if is_cut and not is_forward else 0  # inputs of weights' gradients
        pieces = tp_size - 1 if is_cut else 2 * tp_size
        return seconds, pieces * (len(found) + again) if machine.is_gpu else 0
    if is_cut and config.has_8_bits:  # behind a small all-reduce, of the largest numbers
        gather = links.summing_seconds(config, machine, 0.5) + 2 * links.summing_seconds(config, machine, 0.0)
    if is_forward:  # with SP four gathers and sums, else two all-reduces, which take twice as long
        return len(summed) * once + len(cut) * gather, 0
    inputs, weights = products.inputs, products.weights
    if not is_cut:
        return sum(max(0.0, 2 * once - weights[index]) for index in cut), 0
    gathers = sum(max(0.0, gather - inputs[index]) for index in cut)
    return len(summed) * once + gathers + sum(max(0.0, once - weights[index]) for index in cut), 0


def _in_pieces(
    config: RunConfig, machine: Machine, products: _Products, index: int, message: float, *, is_forward: bool
) -> float:
    """Seconds that a product in TP pieces takes longer than a whole one without messages.

    The first piece of a gather is a rank's own, and so is the last of a sum: these hide all messages that are
    shorter than the rest of the product. Small products reach less, messages need some of the SMs, and parts
    of a sum are added by kernels of their own.

    Args:
        config, machine, products: see there.
        index: of the product.
        message: seconds of its messages.
        is_forward: which pass.
    """
    (times, m, n, k), is_cut = products.sides[index], config.parallel.sequence_parallel
    pieces = config.parallel.tensor_model_parallel_size * (1 if is_cut else 2)
    sides = (m / pieces, n, k) if is_forward else (m / pieces, k, n)
    each = times * product_seconds(machine, config.training.precision, sides, products.size)
    whole = products.each[index] if is_forward else products.inputs[index]
    is_summed = index in products.summed
    hidden = each * (pieces - 1) + (0.0 if is_forward or is_summed else products.weights[index])
    is_sum = is_cut and is_summed == is_forward
    last = message / pieces if is_forward and not is_cut else 0.0  # of an all-reduce
    added = 3 * (pieces - 1) * boundary_bytes(config) / machine.memory_rate if is_sum else 0.0
    lost = each * pieces - whole + machine.reached.contention * message + added
    return max(last, message - hidden) + lost


def _context(config: RunConfig, machine: Machine, attention: float, *, is_forward: bool) -> float:
    """Seconds of CP's messages that a pass of attention does not hide."""
    cp_size, way = config.parallel.context_parallel_size, config.parallel.cp_comm_type
    if cp_size == 1:
        return 0.0
    sent = links.sent_bytes(config, way or "p2p")
    if way == "a2a":
        # An all-to-all of n bytes sends as much as a gather of n bytes in all.
        ranks = links.group_of(config, "cp")
        return links.ring(machine, ranks, 1).seconds(sent / 2 * cp_size / (cp_size - 1))
    # Keys and values in forward; with fp32 gradients in backward. All but the rank's own piece hides them.
    size, steps = element_bytes(config.training.precision), cp_size - 1
    share = (size if is_forward else size + _FP32) / (2 * size + _FP32)
    message = steps * links.neighbour_seconds(machine, config, "cp", sent * share / steps)
    return max(0.0, message - attention * steps / cp_size)


def _offload(config: RunConfig, machine: Machine, forward: float, backward: float) -> float:
    """Seconds by which copies of an offloaded layer's activations exceed the passes beside them."""
    kept = activation_bytes(config, cuda=machine.is_gpu)
    granularity: Recompute | None = "selective" if config.recompute == "selective" else None
    copy = kept[granularity] / (machine.host_link_bandwidth * machine.reached.host_link)
    return max(0.0, copy - forward) + max(0.0, copy - backward)
