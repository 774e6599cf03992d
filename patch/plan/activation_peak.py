"""The most memory that activations take on each process of a pipeline, over all passes of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from patch.config import RunConfig
from patch.device import MachineFacts
from patch.layout.loss_chunks import chunk_length
from patch.layout.pipeline_stages import stage_activations
from patch.plan.activations import activation_bytes, final_norm_bytes, rope_table_bytes
from patch.plan.memory import fp8_weight_bytes, needed_bytes, staging_bytes, state_on_device
from patch.plan.parameters import element_bytes
from patch.plan.pipeline import Moment, Schedule, moments

_FP32 = 4


class ActivationPeak(NamedTuple):
    """Bytes of one process at its worst moment."""

    layers: int
    """What layers keep for backward, of all micro-batches in flight."""
    ends: int
    """What the last norm and the loss keep, and interleaved stages of their outputs."""
    transient: int
    """What the pass itself allocates, with what travels between stages."""
    in_flight: int
    """Micro-batches in flight, counted in each stage of the process."""
    on_host: int
    """Bytes of offloaded layers, in host memory."""

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return self.layers + self.ends + self.transient


class RankMemory(NamedTuple):
    """Bytes on the device of one process."""

    pp_rank: int
    state: int
    """Model state, without optimizer states that `auto` places."""
    staging: int
    """Buffers in which gradients are collected and travel, beside the main gradients."""
    fp8_weights: int
    """8-bit weights that are kept during a step."""
    activations: ActivationPeak

    @property
    def total(self) -> int:
        """All together."""
        return self.state + self.staging + self.fp8_weights + self.activations.total


class StageBytes(NamedTuple):
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

    @property
    def kept(self) -> int:
        """Bytes from forward to backward."""
        return self.layers + self.ends


def heaviest_rank(config: RunConfig, *, cuda: bool) -> RankMemory:
    """The pipeline rank that needs the most memory for model state and activations together.

    Args:
        config: the run, without `--precision-align`, which keeps more.
        cuda: whether it runs on GPUs.
    """
    ranks = (
        RankMemory(
            rank,
            state_on_device(config, rank),
            staging_bytes(config, rank, cuda=cuda),
            fp8_weight_bytes(config, rank),
            activation_peak(config, rank, cuda=cuda),
        )
        for rank in range(config.parallel.pipeline_model_parallel_size)
    )
    return max(ranks, key=lambda rank: rank.total)


def host_memory_needed(config: RunConfig, machine: MachineFacts, heaviest: RankMemory) -> int:
    """Bytes in the host memory of one machine: of a CPU run all, of GPUs what they offload.

    Args:
        config: the run.
        machine: where it runs.
        heaviest: its `heaviest_rank`.
    """
    of_process = heaviest.activations.on_host
    if not machine.cuda_devices:
        of_process += heaviest.total - heaviest.state
    _, state = needed_bytes(config, machine)
    return state + of_process * config.parallel.nproc_per_node


def activation_peak(config: RunConfig, pp_rank: int, *, cuda: bool) -> ActivationPeak:
    """Activations of a process of this pipeline rank.

    Args:
        config: the run, without `--precision-align`.
        pp_rank: the process's place in the pipeline.
        cuda: whether it runs on a GPU.
    """
    schedule = Schedule.of(config)
    stages = tuple(
        stage_bytes(config, chunk * schedule.pp_size + pp_rank, cuda=cuda)
        for chunk in range(schedule.vp_size)
    )
    return _peak(schedule, pp_rank, stages)


@lru_cache(maxsize=4096)  # a search asks for many runs that differ in their optimizer alone
def _peak(schedule: Schedule, pp_rank: int, stages: tuple[StageBytes, ...]) -> ActivationPeak:
    peaks = (peak for moment in moments(schedule, pp_rank) for peak in _peaks_of(moment, stages))
    return max(peaks, key=lambda peak: (peak.total, peak.in_flight))


def _peaks_of(moment: Moment, stages: Sequence[StageBytes]) -> Iterator[ActivationPeak]:
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


def stage_bytes(config: RunConfig, stage: int, *, cuda: bool) -> StageBytes:
    """Bytes of one micro-batch in a pipeline stage.

    Args:
        config: the run, without `--precision-align`.
        stage: its number in the order of the model.
        cuda: whether it runs on a GPU.
    """
    parallel, training, model = config.parallel, config.training, config.model
    size = element_bytes(training.precision)
    tp_size, last = parallel.tensor_model_parallel_size, len(config.stage_layers) - 1
    tokens = config.micro_batch_tokens
    hidden = tokens * model.hidden_size * size
    boundary = hidden // tp_size if parallel.sequence_parallel else hidden
    # The gradients of gate and up; with SP the MLP's gathered input and its gradient.
    gradients = tokens * 2 * model.ffn_hidden_size // tp_size * size
    gradients += 2 * hidden if parallel.sequence_parallel else 0
    layers = _layers_of(config, stage, boundary, cuda=cuda)
    ends, forward = rope_table_bytes(config) if layers else 0, 0
    if stage == last:
        loss = _loss_bytes(config, cuda=cuda)
        norm = final_norm_bytes(model, parallel, training, length=config.sample_length, cuda=cuda)
        ends += loss.kept + norm
        forward = loss.transient
    elif config.virtual_pipeline_size > 1:  # only 1F1B frees them once they are sent
        ends += boundary
    travelling = 2 * boundary if last else 0
    rows = config.padded_vocab_size // tp_size
    return StageBytes(
        layers=sum(layer.kept for layer in layers),
        ends=ends,
        forward=forward + travelling,
        backward=_backward(layers) + gradients + travelling,
        embedding=rows * model.hidden_size * size if stage == 0 else 0,
        on_host=sum(layer.on_host for layer in layers),
    )


class _LayerBytes(NamedTuple):
    kept: int
    """On the device from forward to backward."""
    back: int
    """What its own backward has in addition: computed again, or come back from the host."""
    on_host: int = 0


def _layers_of(config: RunConfig, stage: int, boundary: int, *, cuda: bool) -> list[_LayerBytes]:
    """The layers of a stage, or its blocks of recomputed layers, in the order of forward.

    Args:
        config: the run.
        stage: its number in the order of the model.
        boundary: bytes of a layer's input.
        cuda: whether the layers are on a GPU.
    """
    training, num_layers = config.training, config.stage_layers[stage]
    sections = config.model, config.parallel, training
    of_layer = activation_bytes(*sections, length=config.sample_length, cuda=cuda)
    whole = of_layer[None]
    if config.recompute == "full" and training.recompute_method == "uniform":
        block = training.recompute_num_layers
        return [_LayerBytes(boundary, block * whole - boundary)] * (num_layers // block)
    split = stage_activations(num_layers, training)
    kept = of_layer["selective"] if config.recompute == "selective" else whole
    # Two are on the device at once, of which one travels. What the stage before has sent stays.
    offloaded = [_LayerBytes(0, min(2, split.offloaded) * kept + whole - kept, kept)] * split.offloaded
    if offloaded and stage:
        offloaded[0] = offloaded[0]._replace(kept=boundary, on_host=kept - boundary)
    return [
        *offloaded,
        *[_LayerBytes(boundary, whole - boundary)] * split.recomputed,
        *[_LayerBytes(kept, whole - kept)] * split.kept,
    ]


def _backward(layers: list[_LayerBytes]) -> int:
    """The most bytes of these layers that exist during backward beyond what they keep in all."""
    most, freed = 0, 0
    for layer in reversed(layers):
        most = max(most, layer.back - freed)
        freed += layer.kept
    return most


class _LossBytes(NamedTuple):
    """Bytes of one micro-batch on one rank."""

    kept: int
    """The gradients of hidden states and weight, from the loss to its backward."""
    transient: int
    """A chunk of logits, and the float32 sum of the weight's gradient; until the loss is known."""


def _loss_bytes(config: RunConfig, *, cuda: bool) -> _LossBytes:
    """What the loss without logits needs (not `--precision-align`, which has all logits).

    Args:
        config: the run.
        cuda: whether it runs on GPUs, where Triton's kernels need no float32 copy of a chunk's logits. A CPU
            adds another type to the sum through such a copy.
    """
    training, hidden = config.training, config.model.hidden_size
    rows = config.padded_vocab_size // config.parallel.tensor_model_parallel_size
    tokens = config.micro_batch_tokens
    size = element_bytes(training.precision)
    chunk = chunk_length(rows, hidden)
    logits = min(chunk, tokens) * rows * (size if cuda or size == _FP32 else size + _FP32)
    has_sum = chunk < tokens and size != _FP32
    weight_sum = rows * hidden * _FP32 * (1 if cuda else 2) if has_sum else 0
    return _LossBytes(kept=(tokens + rows) * hidden * size, transient=logits + weight_sum)
