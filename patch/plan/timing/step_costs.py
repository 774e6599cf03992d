"""Seconds of each task of a step: passes of a layer and of a stage, messages, the update.

They are what `step_time` adds up.
"""

from __future__ import annotations

from dataclasses import dataclass

from patch.config import RunConfig
from patch.config.choices import Precision, ZeroStage
from patch.layout.pipeline_stages import stage_activations
from patch.plan.parameters import element_bytes, parameters_per_rank
from patch.plan.timing.communication import (
    GradientTravel,
    boundary_bytes,
    gradient_travel,
    group_of,
    neighbour_seconds,
    ring,
)
from patch.plan.timing.layer_time import LayerTimes, layer_times, product_seconds
from patch.plan.timing.machine import Machine

UPDATE_BYTES = {"fp32": 28, "bf16": 28, "fp16": 34, "fp8": 28}
"""That the optimizer's kernel reads and writes for a parameter: gradient 4, moments 16, master and weight."""
_LOGIT_BYTES = 20
"""For each logit: written, read for its largest and their sum, made a gradient, read by two products."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCosts:
    """Seconds of the tasks of a step, each alone on its device or link; passes are of one micro-batch."""

    layer: LayerTimes
    """Seconds of one layer, in parts."""
    loss: float
    """Output layer and loss with their gradients, which the last stage's forward computes."""
    embedding: tuple[float, float]
    """Forward and backward, in the first stage."""
    forward: tuple[float, ...]
    """Forward of each stage, in the order of the model; with recomputation and what nothing hides of TP and
    CP."""
    backward: tuple[float, ...]
    message: float
    """Between neighbouring stages, one way; 0 without stages."""
    has_hidden_messages: bool
    """Stages compute while their messages travel (interleaved PP)."""
    travel: GradientTravel
    """Collectives of buckets of gradients and weights between replicas."""
    parameters: tuple[int, ...]
    """Elements on a rank of each pipeline rank."""
    shares: int
    """Ranks that share an optimizer state; 1 without sharding."""
    norm: float
    """For each element of a gradient that a rank holds reduced."""
    zero: float
    """For each element of the gradient buffers, to clear them."""
    update: float
    """For each element that a rank updates on its device."""
    copy_down: float
    """For each element whose state is on the host: gradient and weight go there."""
    copy_up: float
    """Its weight comes back."""
    host_update: float
    """Its update, with all processes of the node at it."""


def step_costs(config: RunConfig, machine: Machine) -> StepCosts:
    """The seconds of a run's tasks.

    Args:
        config: the run, its automatic choices made.
        machine: where it runs.
    """
    layer = layer_times(config, machine)
    loss, embedding = _loss(config, machine), _embedding(config, machine)
    forward, backward = _stages(config, layer)
    forward[0], backward[0] = forward[0] + embedding[0], backward[0] + embedding[1]
    forward[-1] += loss
    stages, parallel, precision = len(forward), config.parallel, config.training.precision
    message = neighbour_seconds(machine, config, "pp", boundary_bytes(config)) if stages > 1 else 0.0
    reached, main = machine.reached, element_bytes(config.optimizer.main_grads_dtype)
    bandwidth = machine.memory_rate
    link = machine.host_link_bandwidth * reached.host_link
    of_process = machine.host_bandwidth * reached.host_bandwidth / parallel.nproc_per_node
    return StepCosts(
        layer=layer,
        loss=loss,
        embedding=embedding,
        forward=tuple(forward),
        backward=tuple(backward),
        message=message,
        has_hidden_messages=config.virtual_pipeline_size > 1 and parallel.overlap_p2p_communication,
        travel=gradient_travel(config, machine),
        parameters=tuple(parameters_per_rank(config.model, parallel)),
        shares=1 if config.zero_stage is ZeroStage.NONE else config.num_state_shares,
        norm=main / bandwidth,
        zero=main / bandwidth,
        update=UPDATE_BYTES[precision] / bandwidth,
        copy_down=(main + element_bytes(precision)) / link,
        copy_up=element_bytes(precision) / link,
        host_update=UPDATE_BYTES[precision] / of_process,
    )


def _stages(config: RunConfig, layer: LayerTimes) -> tuple[list[float], list[float]]:
    """Forward and backward of each stage's layers."""
    forward, backward = [], []
    for count in config.stage_layers:
        split = stage_activations(count, config.training)
        selective = layer.selective if config.recompute == "selective" else 0.0
        forward.append(count * layer.forward.total)
        backward.append(
            count * (layer.backward.total + selective)
            + split.recomputed * layer.forward.total
            + split.offloaded * layer.offload
        )
    return forward, backward


def _loss(config: RunConfig, machine: Machine) -> float:
    """Three products with the output layer's weight, in 16 bits at most, and the work on logits."""
    model, training = config.model, config.training
    rows = config.padded_vocab_size // config.parallel.tensor_model_parallel_size
    tokens = config.micro_batch_tokens
    precision: Precision = "bf16" if training.precision == "fp8" else training.precision
    size = element_bytes(precision)
    sides = (tokens, rows, model.hidden_size)
    products = 3 * product_seconds(machine, precision, sides, size)
    bandwidth = machine.memory_rate
    return products + tokens * rows * _LOGIT_BYTES / bandwidth + 2 * _summed(config, machine)


def _embedding(config: RunConfig, machine: Machine) -> tuple[float, float]:
    """Forward reads and writes rows; backward makes a gradient of the whole weight, and adds it up."""
    size, parallel = element_bytes(config.training.precision), config.parallel
    rows = config.padded_vocab_size // parallel.tensor_model_parallel_size
    bandwidth = machine.memory_rate
    boundary = boundary_bytes(config)
    added = 2 * size + 2 * element_bytes(config.optimizer.main_grads_dtype)
    weight = rows * config.model.hidden_size * added
    forward = 2 * boundary / bandwidth + _summed(config, machine)
    return forward, (weight + 2 * boundary) / bandwidth + _summed(config, machine) / 2


def _summed(config: RunConfig, machine: Machine) -> float:
    """Seconds of one sum of hidden states over TP, which the embedding and the output layer need."""
    parallel = config.parallel
    shares = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    return ring(machine, group_of(config, "tp"), 1).seconds(boundary_bytes(config) * shares)
