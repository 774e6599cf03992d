"""Seconds of one layer's forward and backward on one rank, for one micro-batch.

A product takes as long as its FLOPs, or as reading and writing its matrices, whichever is longer; small ones
reach less of the peak. Norms, residuals, RoPE and SwiGLU take as long as the bytes that their fused kernels
read and write. A layer takes at least as long as the host needs to launch its kernels.
"""

from __future__ import annotations

from typing import NamedTuple

from patch.config import RunConfig
from patch.config.choices import PRECISIONS, Precision
from patch.config.fields import with_values
from patch.families import attended_channels, layer_matrices, widths
from patch.families.adapters import adapters_of
from patch.features.backends import can_overlap_tp_comm
from patch.plan.activations import boundary_bytes, dispatch_of, kept_bytes
from patch.plan.flops import mean_pairs
from patch.plan.parameters import element_bytes, trained_share
from patch.plan.timing import communication as links
from patch.plan.timing.machine import Machine

HALF_REACHED = 256
"""Smallest side at which a product reaches half of a large product's rate: an H100 has about 700 TFLOP/s with
sides of 8192, 650 with 4096, 270 with 1024."""
HALF_ATTENTION = 768
"""Sequence length at which attention reaches half of its rate: FlashAttention-3 has 230 TFLOP/s forward at
512, 450 at 2048, 600 at 8192."""
BACKWARD_OF_ATTENTION = 2.5
"""FLOPs of attention's backward over its forward: five products, one of which recomputes the scores."""
LAUNCHES = (12, 30)
"""Kernels of a layer's forward and backward with fused operations."""
_OF_PIECE = 6
"""Host cost of sending a piece of a product, in launches: a receive and a send in one batch, two waits, the
product of the piece. Assumed."""
_FP32 = 4


class LayerTime(NamedTuple):
    """Seconds of one pass through one layer."""

    products: float
    attention: float
    memory: float
    """Norms, residuals, RoPE and SwiGLU; casts of products' inputs."""
    tensor: float
    """Exposed messages of TP."""
    context: float
    """Exposed messages of CP."""
    experts: float
    """Dispatch to experts and combine."""
    launches: float
    """Seconds in which the host launches all kernels."""

    @property
    def waiting(self) -> float:
        """Seconds in which the device waits for launches."""
        return max(0.0, self.launches - (self.products + self.attention + self.memory))

    @property
    def total(self) -> float:
        """Kernels or launches, whichever is longer, and exposed messages."""
        computing = max(self.products + self.attention + self.memory, self.launches)
        return computing + self.tensor + self.context + self.experts


class LayerTimes(NamedTuple):
    """Seconds of one layer and micro-batch on one rank."""

    forward: LayerTime
    backward: LayerTime
    selective: float
    """Seconds that AC=sel adds to backward."""
    offload: float
    """Seconds by which copies of an offloaded layer exceed the passes that hide them."""


def layer_times(config: RunConfig, machine: Machine) -> LayerTimes:
    """Return the seconds of one layer of a run with uniform layers."""
    if config.parallel.tp_comm_overlap is None or (machine.is_gpu and not can_overlap_tp_comm(config)):
        ways = seconds_by_tp_overlap(config, machine)
        overlaps = ways[True] < ways[False] if ways else not machine.is_gpu
        config = with_values(config, tp_comm_overlap=overlaps)
    products, attention = _Products(config, machine), _attention(config, machine)
    reached, traffic = machine.reached, [num_bytes / machine.memory_rate for num_bytes in _traffic(config)]
    again = BACKWARD_OF_ATTENTION * reached.attention_forward / reached.attention_backward
    experts, passes = links.dispatch_seconds(config, machine), []
    for place, is_forward in enumerate((True, False)):
        own = attention if is_forward else attention * again
        tensor, pieces = products.messages(is_forward=is_forward)
        context = _context(config, machine, own, is_forward=is_forward)
        launches = machine.launch_seconds * (LAUNCHES[place] + _OF_PIECE * pieces)
        of_products = products.forward if is_forward else products.backward
        passes.append(LayerTime(of_products, own, traffic[place], tensor, context, experts, launches))
    forward, backward = passes
    offload = _offload(config, machine, forward.total, backward.total)
    return LayerTimes(forward, backward, traffic[2], offload)


def seconds_by_tp_overlap(config: RunConfig, machine: Machine) -> dict[bool, float]:
    """Return seconds of a layer by `--tp-comm-overlap`; {} if there is no choice, as on a CPU.

    Overlap hides messages, but costs smaller products, separate kernels for sums, and host time.
    """
    if not (machine.is_gpu and can_overlap_tp_comm(config)):
        return {}
    ways = {way: layer_times(with_values(config, tp_comm_overlap=way), machine) for way in (False, True)}
    return {way: times.forward.total + times.backward.total for way, times in ways.items()}


def product_seconds(
    machine: Machine, precision: Precision, sides: tuple[float, float, float], written: float
) -> float:
    """Return the seconds of an m x k by k x n product, with `sides` m, n, k and factors in `precision`.

    `written` is the bytes read and written for each element of the result.
    """
    m, n, k = sides
    size, reached = PRECISIONS[precision].factor_bytes, machine.gemm_share(precision)
    reached *= machine.sustained * min(sides) / (min(sides) + HALF_REACHED)
    memory = size * (m * k + k * n) + written * m * n
    return max(2 * m * n * k / (machine.peak_flops(precision) * reached), memory / machine.memory_rate)


_UNPACKING = 14
"""Bytes read and written to unpack one nf4 value, without the value itself (nf4_product.py)."""


class _Products:
    """Seconds of a layer's products: in total, and one by one for the tokens that use each matrix.

    `summed` are the products whose results TP sums, `cut` those whose outputs TP cuts.
    """

    def __init__(self, config: RunConfig, machine: Machine) -> None:
        self.config, self.machine = config, machine
        tokens, self.precision = config.micro_batch_tokens, config.training.precision
        self.size = size = element_bytes(self.precision)
        # Weight gradients are added to the main gradients; without fusion they are also written and read.
        main = element_bytes(config.optimizer.main_grads_dtype)
        added = 2 * main + (0 if config.optimizer.fuses_gradients(cuda=machine.is_gpu) else 2 * size)
        rows, tp_size = layer_matrices(config.model), config.parallel.tensor_model_parallel_size
        self.sides = sides = [(1, tokens * row.active, *row.shard_shape(tp_size)) for row in rows]
        for index, row in enumerate(rows):
            if row.part == "expert":  # a rank's loop over its experts
                number = row.num_experts // config.experts.expert_model_parallel_size
                shape = row.shard_shape(config.etp_size)
                sides[index] = (number, dispatch_of(config).rows / number, *shape)
        self.each = [t * self._seconds(m, n, k) for t, m, n, k in sides]
        self.inputs = [t * self._seconds(m, k, n) for t, m, n, k in sides]
        self.weights = [
            trained_share(config, row.name) * t * self._seconds(n, k, m, added)
            for row, (t, m, n, k) in zip(rows, sides, strict=True)
        ]
        self.summed, self.cut = links.tp_products(config.model)
        self.forward, self.backward = sum(self.each), sum(self.inputs)
        of_row = {row.name: own for row, own in zip(rows, sides, strict=True)}
        for adapter in adapters_of(config.model, config.adapter):
            times, own, *_ = of_row[adapter.base.name]
            parts = config.etp_size if adapter.base.part == "expert" else tp_size
            for out, into in (adapter.a.shard_shape(parts), adapter.b.shard_shape(parts)):
                once = times * self._seconds(own, out, into)
                self.forward, self.backward = self.forward + once, self.backward + 2 * once
        self.backward += sum(self.weights)
        if config.training.mlp_chunks_for_training > 1:  # recomputed
            self.backward += sum(
                once for once, row in zip(self.each, rows, strict=True) if row.part == "mlp"
            )
        if config.adapter.quantize_base:
            made = sum(t * n * k for t, _, n, k in sides) * (_UNPACKING + size) / machine.memory_rate
            self.forward, self.backward = self.forward + made, self.backward + made

    def _seconds(self, m: float, n: float, k: float, written: float = 0.0) -> float:
        return product_seconds(self.machine, self.precision, (m, n, k), written or self.size)

    def messages(self, *, is_forward: bool) -> tuple[float, int]:
        """Return the seconds of TP's exposed messages, and the number of pieces that a GPU's host sends.

        In forward a layer gathers (SP) or receives its input before two products, and sums after two other
        products. In backward the messages of the first two overlap with their weight gradients.
        `--tp-comm-overlap` sends one piece of a product while the next is computed.
        """
        config, machine, summed, cut = self.config, self.machine, self.summed, self.cut
        tp_size, is_cut = config.parallel.tensor_model_parallel_size, config.parallel.sequence_parallel
        if tp_size == 1:
            return 0.0, 0
        once = gather = links.tp_collective_seconds(config, machine)
        if config.parallel.tp_comm_overlap:
            found = sorted(summed + cut) if is_cut else summed if is_forward else cut
            message = once if is_cut else 2 * once
            seconds = sum(self._in_pieces(index, message, is_forward=is_forward) for index in found)
            again = len(cut) if is_cut and not is_forward else 0  # inputs of weights' gradients
            pieces = tp_size - 1 if is_cut else 2 * tp_size
            return seconds, pieces * (len(found) + again) if machine.is_gpu else 0
        sizes = PRECISIONS[config.training.precision]
        if is_cut and sizes.has_casts:  # after a small all-reduce of the absolute maxima
            shares = sizes.factor_bytes / sizes.weight_bytes, 0.0
            part, none = (links.tp_collective_seconds(config, machine, share) for share in shares)
            gather = part + 2 * none
        if is_forward:  # with SP four gathers and sums, else two all-reduces, each twice as long
            return len(summed) * once + len(cut) * gather, 0
        if not is_cut:
            return sum(max(0.0, 2 * once - self.weights[index]) for index in cut), 0
        gathers = sum(max(0.0, gather - self.inputs[index]) for index in cut)
        return len(summed) * once + gathers + sum(max(0.0, once - self.weights[index]) for index in cut), 0

    def _in_pieces(self, index: int, message: float, *, is_forward: bool) -> float:
        """Seconds by which a product in TP pieces exceeds a whole product without messages.

        The first piece of a gather and the last piece of a sum are the rank's own. So messages are hidden if
        they are shorter than the other pieces. Small products reach less of the peak, messages occupy SMs,
        and separate kernels add the parts of a sum. `message` is the seconds of the product's messages.
        """
        (times, m, n, k), is_cut = self.sides[index], self.config.parallel.sequence_parallel
        pieces = self.config.parallel.tensor_model_parallel_size * (1 if is_cut else 2)
        each = times * (self._seconds(m / pieces, n, k) if is_forward else self._seconds(m / pieces, k, n))
        whole = self.each[index] if is_forward else self.inputs[index]
        is_summed = index in self.summed
        hidden = each * (pieces - 1) + (0.0 if is_forward or is_summed else self.weights[index])
        last = message / pieces if is_forward and not is_cut else 0.0  # of an all-reduce
        is_sum = is_cut and is_summed == is_forward
        sums = 3 * (pieces - 1) * boundary_bytes(self.config) / self.machine.memory_rate if is_sum else 0.0
        lost = each * pieces - whole + self.machine.reached.contention * message + sums
        return max(last, message - hidden) + lost


def _attention(config: RunConfig, machine: Machine) -> float:
    model, parallel, training = config.model, config.parallel, config.training
    heads = model.num_attention_heads // parallel.tensor_model_parallel_size
    pairs = mean_pairs([config.sample_length], model) / parallel.context_parallel_size
    flops = 4 * heads * attended_channels(model) * pairs * training.micro_batch_size
    precision: Precision = "fp32" if training.precision == "fp32" else "bf16"
    is_ring = parallel.cp_comm_type == "p2p"
    length = config.sample_length / (parallel.context_parallel_size if is_ring else 1)
    reached = machine.reached.attention_forward * machine.sustained
    rate = machine.peak_flops(precision) * reached
    return flops / (rate * length / (length + HALF_ATTENTION))


def _traffic(config: RunConfig) -> tuple[float, float, float]:
    """Bytes that the other kernels of a layer read and write: forward, backward, AC=sel's recomputation."""
    model, tp_size = config.model, config.parallel.tensor_model_parallel_size
    hidden, size = model.hidden_size / config.sp_size, element_bytes(config.training.precision)
    attention, mlp = widths(model, "attention", tp_size), widths(model, "mlp", tp_size)
    # q, k and v are read and written again: rotated by RoPE, or widened by ALiBi.
    norms, residuals, rope, swiglu = 2 * 2 * hidden, 2 * 3 * hidden, 2 * attention.out_features, sum(mlp)
    forward = norms + residuals + rope + swiglu
    backward = 2 * 3 * hidden + residuals + rope + 2 * swiglu
    of_cast = PRECISIONS[config.training.precision].cast_bytes / size
    inputs = 2 * model.hidden_size + attention.in_features + mlp.in_features
    forward += (2 * hidden + attention.in_features + mlp.in_features) * of_cast
    backward += (inputs + attention.out_features + mlp.out_features) * of_cast
    tokens = config.micro_batch_tokens
    return tokens * size * forward, tokens * size * backward, tokens * size * (norms + swiglu)


def _context(config: RunConfig, machine: Machine, attention: float, *, is_forward: bool) -> float:
    cp_size, way = config.parallel.context_parallel_size, config.parallel.cp_comm_type
    if cp_size == 1:
        return 0.0
    sent = links.sent_bytes(config, way or "p2p")
    if way == "a2a":
        # An all-to-all of n bytes sends as much as an all-gather to n bytes.
        ranks = links.group_of(config, "cp")
        return links.ring(machine, ranks, 1).seconds(sent / 2 * cp_size / (cp_size - 1))
    # Keys and values in forward, also fp32 gradients in backward. All pieces but the rank's own hide them.
    size, steps = element_bytes(config.training.precision), cp_size - 1
    share = (size if is_forward else size + _FP32) / (2 * size + _FP32)
    message = steps * links.neighbour_seconds(machine, config, "cp", sent * share / steps)
    return max(0.0, message - attention * steps / cp_size)


def _offload(config: RunConfig, machine: Machine, forward: float, backward: float) -> float:
    copy = kept_bytes(config, cuda=machine.is_gpu) / (machine.host_link_bandwidth * machine.reached.host_link)
    return max(0.0, copy - forward) + max(0.0, copy - backward)
