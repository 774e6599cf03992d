"""The formulas behind the plan's lines, with the numbers of a run."""

from __future__ import annotations

from collections.abc import Iterator

from patch.config import RunConfig
from patch.config.choices import ZeroStage
from patch.families import weight_rows
from patch.families.weights import TIED_OUTPUT
from patch.plan.activation_peak import heaviest_rank
from patch.plan.activations import activation_bytes
from patch.plan.flops import attended_pairs, flops_per_step
from patch.plan.memory import STATE_BYTES, bytes_per_rank, usable_device_memory
from patch.plan.parameters import element_bytes, layer_matrices, parameters_per_rank
from patch.plan.pipeline import Schedule
from patch.plan.timing.machine import Machine
from patch.plan.timing.step_time import StepTime
from patch.storage.sizes import size_text, timed


def explanations(config: RunConfig, machine: Machine, time: StepTime) -> dict[str, list[str]]:
    """By the first word of a line of the plan: the formulas behind it.

    Args:
        config: the run, its automatic choices made.
        machine: what it is planned for.
        time: of a step.
    """
    return {
        "parameters": list(_parameters(config)),
        "state/rank": list(_state(config)),
        "activations": list(_activations(config, machine)),
        "memory/rank": list(_memory(config, machine)),
        "bubble": list(_bubble(config)),
        "step": list(_flops(config)),
        "time": [f"{part.name}: {part.formula}" for part in time.parts if part.seconds],
        "planned": list(_machine(machine)),
    }


def _parameters(config: RunConfig) -> Iterator[str]:
    model = config.model
    for row in weight_rows(model):
        if row.name == TIED_OUTPUT and not model.untie_embeddings_and_output_weights:
            continue
        times = f"{model.num_layers} layers x " if row.is_per_layer else ""
        shapes = " + ".join(" x ".join(map(str, shape)) for shape in row.hf.values())
        yield f"{row.name}: {times}({shapes})"


def _state(config: RunConfig) -> Iterator[str]:
    of_ranks = parameters_per_rank(config.model, config.parallel)
    shares, stage = config.num_state_shares, config.zero_stage
    state, precision = bytes_per_rank(config), config.training.precision
    yield (
        f"{max(of_ranks)} parameters on the heaviest rank: of its stage, matrices and vocabulary over TP "
        f"{config.parallel.tensor_model_parallel_size}"
    )
    yield f"weights: {max(of_ranks)} x {element_bytes(precision)} bytes = {size_text(state.weights)}"
    cut = f" / {shares}" if stage is ZeroStage.GRADIENTS else ""
    main = element_bytes(config.optimizer.main_grads_dtype)
    yield f"gradients: {max(of_ranks)} x {main} bytes{cut} = {size_text(state.gradients)}"
    cut = "" if stage is ZeroStage.NONE else f" / {shares}"
    yield (
        f"optimizer: {max(of_ranks)} x {STATE_BYTES[precision]} bytes{cut} (moments 8, and what a float32 "
        f"master has beyond the weight), less what is on the host = {size_text(state.optimizer)}"
    )


def _activations(config: RunConfig, machine: Machine) -> Iterator[str]:
    model, parallel, training = config.model, config.parallel, config.training
    kept = activation_bytes(model, parallel, training, length=config.sample_length, cuda=machine.is_gpu)
    tokens = config.micro_batch_tokens
    for setting, num_bytes in kept.items():
        yield f"{setting or 'none'}: {tokens} tokens x {num_bytes / tokens:.0f} bytes of a token"
    yield "none keeps norms' inputs and outputs, q, k, v, attention's result, gate, up and their product"
    yield "sel leaves out what the norms give and the product; full keeps the layer's input"


def _memory(config: RunConfig, machine: Machine) -> Iterator[str]:
    if config.model.precision_align is not None:
        return
    rank = heaviest_rank(config, cuda=machine.is_gpu)
    usable = usable_device_memory(config, machine.facts)
    kept = rank.activations
    yield (
        f"{rank.state} state + {rank.staging} of gradients under way + {rank.fp8_weights} 8-bit weights + "
        f"{kept.layers} of layers + {kept.ends} of ends + {kept.transient} of the running pass = "
        f"{rank.total} bytes"
    )
    yield (
        "the running pass: layers that are computed again, gradients of gate and up, a chunk of logits, "
        "messages; the worst moment of a step counts"
    )
    if machine.is_gpu:
        yield (
            f"may use {size_text(usable)} of {size_text(machine.device_memory_bytes)}: 5 % and 1 GiB are for "
            "CUDA, NCCL, cuDNN and fragmentation"
        )


def _bubble(config: RunConfig) -> Iterator[str]:
    schedule = Schedule.of(config)
    yield (
        f"(p - 1) / (v m) = ({schedule.pp_size} - 1) / ({schedule.vp_size} x {schedule.num_micro_batches}); "
        "unequal stages are simulated pass by pass"
    )


def _flops(config: RunConfig) -> Iterator[str]:
    model, length = config.model, config.sample_length
    tokens = config.training.global_batch_size * length
    pairs = attended_pairs([length], model.window_size)
    heads = model.num_attention_heads * model.kv_channels
    yield (
        f"3 x (2 x {tokens} tokens x ({model.num_layers} layers x {layer_matrices(model)} + output "
        f"{config.padded_vocab_size} x {model.hidden_size}) + {config.training.global_batch_size} x 4 x "
        f"{model.num_layers} x {heads} x {pairs} pairs) = {flops_per_step(config).model:.4g}"
    )
    yield "a multiply-add is 2 FLOPs, backward is twice forward, attention counts the pairs under its mask"


def _machine(machine: Machine) -> Iterator[str]:
    reached = machine.reached
    yield (
        f"of a device: {machine.bf16_flops / 1e12:g} TFLOP/s in bf16, {machine.fp8_flops / 1e12:g} in fp8, "
        f"{machine.device_bandwidth / 1e12:g} TB/s; GB/s each way: in a node "
        f"{machine.node_link_bandwidth / 1e9:g}, to others {machine.network_bandwidth / 1e9:g}, to the host "
        f"{machine.host_link_bandwidth / 1e9:g}"
    )
    yield (
        f"assumed shares: products {reached.gemm}, attention {reached.attention_forward} and "
        f"{reached.attention_backward}, memory {reached.device_bandwidth}, all three sustained "
        f"{reached.sustained}; links {reached.node_link}, {reached.network} and {reached.host_link}"
    )
    yield f"a collective's step takes {timed(machine.node_link_latency)}, or {timed(machine.network_latency)}"
