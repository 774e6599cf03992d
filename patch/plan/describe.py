"""The plan as text: its rows with the formulas behind them, and two lines at the start of a log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from patch.checks.run_length import is_counted_in_samples, num_train_samples, with_samples
from patch.config import RunConfig
from patch.config.backends import backends_of
from patch.config.choices import PRECISIONS, Recompute, ZeroStage
from patch.device import MachineFacts
from patch.families import expert_layers, weight_rows
from patch.families.weights import TIED_OUTPUT
from patch.numbers import counted, scaled, size_text
from patch.plan.activations import activation_bytes, dispatch_of
from patch.plan.fits import fit_of, heaviest_rank
from patch.plan.flops import attended_pairs, channels_of_heads, flops_per_step, output_in_layers
from patch.plan.memory import (
    all_bytes,
    bytes_per_rank,
    device_memory,
    disk_bytes,
    host_bytes,
    state_bytes,
    units_of,
    usable_device_memory,
)
from patch.plan.parameters import (
    active_elements,
    element_bytes,
    frozen_of,
    layer_kinds,
    parameters_of,
    parameters_per_rank,
    total_parameters,
    trained_parameters,
)
from patch.plan.pipeline import Schedule, better_split, stage_work, step_timing
from patch.plan.resolve import stage_cost, with_sharding
from patch.plan.savings import Mix
from patch.preflight.checkpoint_places import newest_saved

INDENT = " " * 12
_ROUNDED = 0.0005
"""A difference that one digit of a percentage does not show."""


class PlanRow(NamedTuple):
    """What the plan says about one thing."""

    lines: Sequence[str]
    """The first begins with what it is about, the others are indented."""
    formulas: Sequence[str] = ()
    """How the numbers were computed."""


def plan_rows(config: RunConfig, machine: MachineFacts) -> Iterator[PlanRow]:
    """Rows about processes, parameters, bytes of a rank, a step, the whole run; and warnings.

    Args:
        config: the run.
        machine: the machine whose memory is compared with what the run needs; all are taken to be equal.
    """
    model, layers = config.model, config.stage_layers
    yield PlanRow([f"processes   {processes_text(config)}"])
    if len(set(layers)) > 1:
        split = " + ".join(map(str, layers))
        yield PlanRow([f"layers      {model.num_layers} = {split} over the pipeline stages"])
    total, active = (total_parameters(model, active=active) for active in (False, True))
    size = f"{scaled(total)} ({model.model_size})" + (f", {scaled(active)} active" if active < total else "")
    if config.adapter.lora_rank:
        trained = trained_parameters(config)
        size += (
            f"; adapters of rank {config.adapter.lora_rank} train: {scaled(trained)} ({trained / total:.2%})"
        )
    papers = _papers(config)
    yield PlanRow([f"parameters  {size}"], [*_shapes(config), *papers.parameters])
    if model.num_experts:
        yield _experts(config)
    yield _state(config, machine)
    yield _checkpoint(config)
    if model.precision_align is None:  # which keeps more
        yield _activations(config, machine, papers.activations)
        yield _memory(config, machine)
    if config.parallel.pipeline_model_parallel_size > 1:
        yield _bubble(config, machine)
    yield _step(config, papers.step)
    if config.data.packing and config.data.dataset_type == "raw":  # .bin/.idx are as they were made
        packed = f"several rows share a sequence of {config.sample_length} tokens"
        yield PlanRow([f"packing     on: {packed}, a sample of the step is such a sequence"])
    if config.training.objective == "dpo":
        once = "before the first step one forward over all sets gives their reference, unless it is kept"
        yield PlanRow([f"pairs       each lies in one sequence of {config.sample_length} tokens; {once}"])
    if machine.cuda_devices:
        yield PlanRow([f"kernels     {backends_of(config, machine).line}"])
    yield PlanRow([f"run         {_length(config)}"])
    if found := newest_saved(config):  # by its name: whether it is whole is not read
        root, newest = found
        of_all = "" if is_counted_in_samples(config) else f" of {config.training.train_iters}"
        yield PlanRow([f"resume      after step {newest}{of_all}, from {root}"])
    yield PlanRow(list(_shortages(config, machine)))


def describe_plan(config: RunConfig, machine: MachineFacts) -> str:
    """The lines of a plan without formulas.

    Args:
        config, machine: see `plan_rows`.
    """
    return "\n".join(line for row in plan_rows(config, machine) for line in row.lines)


def processes_text(config: RunConfig) -> str:
    """Processes, their axes and machines: "8 = TP 2 x PP 1 x CP 1 x DP 4 on 1 machine"."""
    parallel, stages = config.parallel, config.virtual_pipeline_size
    return (
        f"{config.world_size} = TP {parallel.tensor_model_parallel_size} "
        f"x PP {parallel.pipeline_model_parallel_size} x CP {parallel.context_parallel_size} "
        f"x DP {config.data_parallel_size} on {counted(parallel.nnodes, 'machine')}"
        + (f", {stages} interleaved stages each" if stages > 1 else "")
        + (f", experts over {_expert_axes(config)}" if config.model.num_experts else "")
    )


def _expert_axes(config: RunConfig) -> str:
    ep_size = config.experts.expert_model_parallel_size
    return f"EP {ep_size} x ETP {config.etp_size} x EDP {config.num_expert_copies}"


def _experts(config: RunConfig) -> PlanRow:
    """The experts of a layer and of a rank, and the messages to them."""
    model, ep_size, way = config.model, config.experts.expert_model_parallel_size, dispatch_of(config)
    number, layers = model.num_experts or 0, len(expert_layers(model))
    parts, visits = config.etp_size, model.moe_router_topk
    shared = " and a shared one" if model.moe_shared_expert_intermediate_size else ""
    line = (
        f"experts     {number} in each of {counted(layers, 'layer')}, of which a token visits {visits}"
        f"{shared}; {number // ep_size} on a rank, which sends {size_text(int(way.sent))} a layer and "
        f"micro-batch, and as much back ({way.words})"
    )
    parallel, experts = config.parallel, config.experts
    of_rank = max(parameters_per_rank(model, parallel, experts, of_experts=True))
    return PlanRow([line], [
        f"{of_rank} parameters of experts on the heaviest rank; {config.num_expert_copies} ranks have the "
        "same, and share their states if these are sharded",
        f"{way.rows:.0f} tokens of its own experts on a rank, if all are visited alike: {visits} x "
        f"{config.micro_batch_tokens} tokens of a micro-batch" + (f", ETP {parts}" if parts > 1 else ""),
    ])  # fmt: skip


def _shapes(config: RunConfig) -> Iterator[str]:
    """The weights that are counted."""
    model = config.model
    for row in weight_rows(model):
        if row.name == TIED_OUTPUT and not model.untie_embeddings_and_output_weights:
            continue
        times = f"{len(row.layers)} layers x " if row.is_per_layer else ""
        times += f"{row.num_experts} experts x " if row.num_experts > 1 else ""
        shapes = " + ".join(" x ".join(map(str, shape)) for shape in row.hf.values())
        yield f"{row.name}: {times}({shapes})"


class _Papers(NamedTuple):
    """What papers count of GPT's layers, beside what the plan counts."""

    parameters: list[str]
    activations: list[str]
    step: list[str]


def _papers(config: RunConfig) -> _Papers:
    """Of a model with GPT's layers (12 h^2 of matrices and 13 h of biases and norms), else nothing.

    Sources: Korthikanti et al., arXiv:2205.05198, section 4 (bytes of 16-bit activations, of which 2 s^2 a
    are scores and dropout masks); Narayanan et al., arXiv:2104.04473, section 5.1 (the whole square).
    """
    model, parallel = config.model, config.parallel
    b, s, h = config.training.micro_batch_size, config.sample_length, model.hidden_size
    a, t, num_layers = model.num_attention_heads, parallel.tensor_model_parallel_size, model.num_layers
    if sum(row.num_elements for row in weight_rows(model) if row.is_per_layer) != 12 * h**2 + 13 * h:
        return _Papers([], [], [])
    s //= parallel.context_parallel_size
    kept, cut = {"2 s b h": 2.0 * s * b * h}, ""
    if t > 1 and not parallel.sequence_parallel:
        kept["s b h (10 + 24 / t + 5 a s / (h t))"] = s * b * h * (10 + 24 / t + 5 * a * s / (h * t))
    else:
        kept, cut = {"2 s b h": 2 * s * b * h / t}, " / t" * (t > 1)
        kept["s b h (34 + 5 a s / h)"] = s * b * h * (34 + 5 * a * s / h) / t
    partly, whole = (f"{formula}{cut} = {size_text(int(size))}" for formula, size in kept.items())
    s, samples = config.sample_length, config.training.global_batch_size
    layer = samples * (24 * s * h**2 + 4 * s**2 * h)
    step = 3 * (num_layers * layer + 2 * samples * s * h * config.padded_vocab_size)
    return _Papers(
        [f"a layer: 12 h^2 + 13 h = {12 * h**2 + 13 * h}"],
        [f"papers, with all scores and dropout, in 16 bits: {whole}; all recomputed: {partly}"],
        [
            "papers, over the whole square of scores: a layer's forward 24 B s h^2 + 4 B s^2 h = "
            f"{layer:.4g}; 72 B L s h^2 (1 + s / (6 h) + V / (12 h L)) = {step:.4g} a step"
        ],
    )


def _checkpoint(config: RunConfig) -> PlanRow:
    """What one checkpoint takes on disk; no layout changes it."""
    kind, count = PRECISIONS[config.training.precision], trained_parameters(config)
    weights, states = (int(count * num_bytes) for num_bytes in (kind.weight_bytes, state_bytes(config)))
    line = (
        f"checkpoint  {size_text(weights + states)} = weights {size_text(weights)} + optimizer "
        f"{size_text(states)}"
    )
    return PlanRow([line], [
        f"{count:.0f} parameters x ({kind.weight_bytes} + {state_bytes(config):g} bytes); the weights alone "
        f"are what {'adapter/' if config.adapter.lora_rank else 'an export'} takes",
    ])  # fmt: skip


def _state(config: RunConfig, machine: MachineFacts) -> PlanRow:
    """Model state of the heaviest rank."""
    parallel, stage, state = config.parallel, config.zero_stage, bytes_per_rank(config)
    host, instances = host_bytes(config), parallel.num_distributed_optimizer_instances
    disk = disk_bytes(config, machine) if host.optimizer else 0
    weights, gradients, optimizer = map(size_text, state)
    count, shares = parameters_of(config, None), config.num_state_shares
    precision, main = config.training.precision, element_bytes(config.optimizer.main_grads_dtype)
    line = (
        f"state/rank  {size_text(state.total)} = weights {weights} + gradients {gradients} "
        f"+ optimizer {optimizer}"
        + (f" ({size_text(host.total - disk)} more in host memory" if host.total else "")
        + (f", {size_text(disk)} on a disk" if disk else "")
        + (")" if host.total else "")
        + f" (data-parallel sharding: {stage.name.lower()}"
        + (f" in {instances} instances)" if instances > 1 else ")")
    )
    frozen = frozen_of(config, None)
    beside = f", and {frozen.total} that do not train" if frozen.total else ""
    packed = f" + {frozen.in_4_bits} in 4 bits x 9 / 16" if frozen.in_4_bits else ""
    experts = parameters_of(config, None, of_experts=True)
    of_experts = f" ({experts} of experts / {config.num_expert_copies})" if experts else ""
    weight_parts, gradient_parts, state_parts = (
        f" / {shares}{of_experts}" if shared else ""
        for shared in (config.frees_weights, stage.shares_gradients, stage.shares_states)
    )
    moments = f"{config.optimizer.moment_bytes:g}"
    less = ", less what is on the host" if any(host[:2]) else ""
    if config.frees_weights:
        whole = sum(unit.total for unit in units_of(config, None, as_kept=True))
        less = f" of the {size_text(whole)} in layers and vocabulary, the rest whole{less}"
    return PlanRow([line], [
        f"{count} parameters on the heaviest rank: of its stage, matrices and vocabulary over TP "
        f"{parallel.tensor_model_parallel_size}{beside}",
        f"weights: {count + frozen.dense} x {element_bytes(precision)} bytes{packed}{weight_parts}{less} = "
        f"{weights}",
        f"gradients: {count} x {main} bytes{gradient_parts} = {gradients}",
        f"optimizer: {count} x {state_bytes(config):g} bytes{state_parts} (moments {moments}, and what "
        f"a float32 master has beyond the weight), less what is on the host = {optimizer}",
        *(_levels(config) if shares > 1 and not frozen.total else ()),
    ])  # fmt: skip


def _levels(config: RunConfig) -> Iterator[str]:
    """What each level of sharding holds and sends: ZeRO's table, for this run.

    Source: Rajbhandari et al., arXiv:1910.02054, figure 1 and section 7.
    """
    shares, times = config.num_state_shares, config.num_micro_batches
    sizes = element_bytes(config.training.precision), element_bytes(config.optimizer.main_grads_dtype)
    of_each = [f"{num_bytes:g}" for num_bytes in (*sizes, state_bytes(config))]
    sent = {
        ZeroStage.NONE: 2,
        ZeroStage.OPTIMIZER: 2,
        ZeroStage.GRADIENTS: times + 1,
        ZeroStage.PARAMETERS: 3 * times,
    }
    yield (
        f"bytes of a parameter: weights {of_each[0]}, gradients {of_each[1]}, states {of_each[2]}; of psi "
        f"parameters each of {shares} ranks keeps, on device and host, and sends in a step of "
        f"{counted(times, 'micro-batch')}:"
    )
    for stage, elements in sent.items():
        cost, held = stage_cost(config, stage), all_bytes(with_sharding(config, stage), None).total
        is_shared = [stage.shares_parameters, stage.shares_gradients, stage.shares_states]
        terms = [f"{each} psi" + f" / {shares}" * part for each, part in zip(of_each, is_shared, strict=True)]
        yield (
            f"{stage.name.lower()}: {' + '.join(terms)} = {size_text(held)}; {elements} psi elements = "
            f"{size_text(cost.moved)}"
        )


def _activations(config: RunConfig, machine: MachineFacts, papers: Sequence[str]) -> PlanRow:
    """What layers keep, and the run's mix."""
    words: dict[Recompute | None, str] = {None: "none", "selective": "sel", "full": "full"}
    dense, sparse = layer_kinds(config)
    others, kept = (activation_bytes(run, cuda=bool(machine.cuda_devices)) for run in (dense, sparse))
    texts = [
        ", ".join(f"{words[setting]} {size_text(num_bytes)}" for setting, num_bytes in of_kind.items())
        for of_kind in (kept, others)
    ]
    line = (
        f"activations a layer and micro-batch keep {texts[0]} for backward"
        + (f" (without experts {texts[1]})" if dense is not sparse else "")
        + f"; this run: {Mix.of(config).words} (AC)"
    )
    tokens = config.micro_batch_tokens
    of_token = {setting or "none": f"{num_bytes / tokens:.0f}" for setting, num_bytes in kept.items()}
    return PlanRow([line], [
        *(f"{name}: {tokens} tokens x {number} bytes of a token" for name, number in of_token.items()),
        "none keeps norms' inputs and outputs, q, k, v, attention's result, gate, up and their product",
        "sel leaves out what the norms give and the product; full keeps the layer's input",
        *papers,
    ])  # fmt: skip


def _memory(config: RunConfig, machine: MachineFacts) -> PlanRow:
    """Memory of the heaviest rank."""
    rank = heaviest_rank(config, cuda=bool(machine.cuda_devices))
    kept, pp_size = rank.activations, config.parallel.pipeline_model_parallel_size
    where = f" on pipeline rank {rank.pp_rank} of {pp_size}" if pp_size > 1 else ""
    in_flight = counted(kept.in_flight, "micro-batch") + " in flight"
    if config.virtual_pipeline_size > 1:
        in_flight = f"{in_flight} through {config.virtual_pipeline_size} stages"
    staging = f"+ gradients under way {size_text(rank.staging)} " if rank.staging else ""
    staging += f"+ weights of a pass {size_text(rank.whole)} " if rank.whole else ""
    narrow = f"+ 8-bit weights {size_text(rank.eight_bits)} " if rank.eight_bits else ""
    on_host = f"; {size_text(kept.on_host)} more in host memory" if kept.on_host else ""
    line = (
        f"memory/rank {size_text(rank.total)} at most{where} = state {size_text(rank.state)} {staging}"
        f"{narrow}+ activations {size_text(kept.total)} ({in_flight}: layers {size_text(kept.layers)}, "
        f"loss, borders and RoPE {size_text(kept.ends)}, "
        f"the running pass {size_text(kept.transient)}{on_host})"
    )
    formulas = [
        f"{rank.state} state + {rank.staging} of gradients under way + "
        + (f"{rank.whole} of weights that are whole + " if rank.whole else "")
        + f"{rank.eight_bits} 8-bit weights + "
        f"{kept.layers} of layers + {kept.ends} of ends + {kept.transient} of the running pass = "
        f"{rank.total} bytes",
        "the running pass: layers that are computed again, gradients of gate and up, a chunk of logits, "
        "messages; the worst moment of a step counts",
    ]
    if machine.cuda_devices:
        usable = usable_device_memory(config, machine)
        formulas.append(
            f"may use {size_text(usable)} of {size_text(machine.cuda_memory_bytes)}: 5 % and 1 GiB are for "
            "CUDA, NCCL, cuDNN and fragmentation"
        )
    return PlanRow([line], formulas)


def _bubble(config: RunConfig, machine: MachineFacts) -> PlanRow:
    """Idle time of the pipeline by its schedule, and the stage that is to blame."""
    schedule, timing = Schedule.of(config), step_timing(config)
    equal = f"(PP - 1) / {schedule.num_micro_batches} micro-batches"
    if schedule.vp_size > 1:
        equal = f"(PP - 1) / (VPP {schedule.vp_size} x {schedule.num_micro_batches} micro-batches)"
    formula = (
        f"(p - 1) / (v m) = ({schedule.pp_size} - 1) / ({schedule.vp_size} x {schedule.num_micro_batches}); "
        "unequal stages are simulated pass by pass"
    )
    idle = f"bubble      {timing.bubble:.1%} of the computing time"
    if timing.bubble <= 1.01 * schedule.formula + _ROUNDED:
        return PlanRow([f"{idle} = {equal}"], [formula])
    work = stage_work(config).layers
    heaviest = max(range(len(work)), key=lambda stage: work[stage])
    lines = [
        f"{idle}; if all stages took equally long, {equal} = {schedule.formula:.1%}",
        f"{INDENT}stage {heaviest + 1} of {len(work)} is the heaviest: the work of {work[heaviest]:.1f} "
        f"layers, {sum(work) / len(work):.1f} on average (output layer and loss: "
        f"{output_in_layers(config):.1f})",
    ]
    if split := better_split(config, machine):
        saved = 1 - split.timing.step / timing.step
        line = f"{INDENT}{split.flags} would idle {split.timing.bubble:.1%} and take {saved:.1%} less time"
        if config.model.precision_align is None:
            needed = heaviest_rank(split.run, cuda=bool(machine.cuda_devices)).total
            line += f", with {size_text(needed)} a rank"
        lines.append(line)
    return PlanRow(lines, [formula])


def _step(config: RunConfig, papers: Sequence[str]) -> PlanRow:
    """Samples, tokens and FLOPs of a step, and those with what recomputation repeats if they are more."""
    model, samples, length = config.model, config.training.global_batch_size, config.sample_length
    flops, tokens = flops_per_step(config), samples * length
    again = f", {scaled(flops.hardware)}FLOP with recomputation" if flops.hardware > flops.model else ""
    line = (
        f"step        {samples} samples x {length} tokens = {tokens} tokens, "
        f"{counted(config.num_micro_batches, 'micro-batch')} a replica, {scaled(flops.model)}FLOP{again}"
    )
    heads = channels_of_heads(model)
    pairs = attended_pairs([length], model.window_size)
    times, rest = 3, f"{samples} x 4 x {model.num_layers} x {heads} x {pairs} pairs)"
    beside = "backward is twice forward"
    if config.adapter.lora_rank:
        times, rest = 2, f"3 / 2 x {rest[:-1]}) + 6 x {tokens} tokens x adapters that a token uses"
        beside = "backward of weights beside adapters is one forward, else twice"
    return PlanRow([line], [
        f"{times} x (2 x {tokens} tokens x ({model.num_layers} layers x {active_elements(model)} + output "
        f"{config.padded_vocab_size} x {model.hidden_size}) + {rest} = {flops.model:.4g}",
        f"a multiply-add is 2 FLOPs, {beside}, attention counts the pairs under its mask",
        *papers,
    ])  # fmt: skip


def _length(config: RunConfig) -> str:
    training = config.training
    if training.train_epochs is not None:
        return f"{_epochs(f'{training.train_epochs:g}')}; the steps follow from the training set"
    tokens = training.train_iters * training.global_batch_size * config.sample_length
    return f"{training.train_iters} steps = {scaled(tokens)} tokens"


def describe_length(config: RunConfig, one_pass: int) -> str:
    """A line about the steps and epochs of the run.

    Args:
        config: the run.
        one_pass: samples of one pass over its training sets.

    Raises:
        ConfigError: its epochs have fewer steps than its warm-up.
    """
    taken = num_train_samples(config, one_pass)
    steps = with_samples(config, taken).training.train_iters
    epochs = _epochs(f"{taken / one_pass:.3g}")
    return f"length      {counted(steps, 'step')} = {epochs} of {counted(one_pass, 'sample')}"


def _epochs(number: str) -> str:
    return f"{number} epoch" if number == "1" else f"{number} epochs"


def _shortages(config: RunConfig, machine: MachineFacts) -> Iterator[str]:
    """A line for each memory that is too small."""
    fit, device = fit_of(config, machine), device_memory(config, machine)
    what = "model state" if config.model.precision_align is not None else "model state and activations"
    if 0 < device < fit.device_needed:
        name = "GPU" if machine.cuda_devices else "simulated device"
        yield f"warning     {size_text(fit.device_needed)} of {what} on a {name} that has {size_text(device)}"
    if not fit.is_on_host:
        processes = counted(config.parallel.nproc_per_node, "process")
        of_host = "model state" if machine.cuda_devices else what
        yield (
            f"warning     {size_text(fit.host_needed)} of {of_host} in the host memory of {processes}, "
            f"a machine has {size_text(fit.host_usable)}"
        )


def start_lines(config: RunConfig, *, cuda: bool) -> tuple[str, str]:
    """The layout and a step's micro-batches; the planned memory of the heaviest rank by kind.

    Args:
        config: the run, its automatic choices made.
        cuda: whether it runs on GPUs.
    """
    micro_batches = counted(config.num_micro_batches, "micro-batch")
    samples = counted(config.training.micro_batch_size, "sample")
    layout = (
        f"layout: processes {processes_text(config)}; replicas share {config.zero_stage.shared_text}; "
        f"a step has {micro_batches} of {samples} a replica"
    )
    if config.model.precision_align is not None:
        text = _by_kind(*bytes_per_rank(config))
        return layout, f"planned state of a rank: {text}; --precision-align's activations are not planned"
    rank = heaviest_rank(config, cuda=cuda)
    weights, gradients, states = bytes_per_rank(config, rank.pp_rank)
    is_auto = config.optimizer.optimizer_offload_policy == "auto"
    text = _by_kind(
        weights, gradients, 0 if is_auto else states,
        rank.staging, rank.eight_bits, rank.activations.total, rank.whole,
    )  # fmt: skip
    if is_auto:
        text += f"; {size_text(states)} of optimizer states beside it as far as there is room"
    on_host = host_bytes(config, rank.pp_rank).total + rank.activations.on_host
    text += f"; {size_text(on_host)} more in host memory" if on_host else ""
    return layout, f"planned memory of the heaviest rank: {text}"


def _by_kind(
    weights: int, gradients: int, states: int, staging: int = 0, eight_bits: int = 0, activations: int = 0,
    whole: int = 0,
) -> str:  # fmt: skip
    """A sum of bytes and its parts, those that are not 0."""
    kinds = {
        "weights": weights,
        "gradients": gradients,
        "optimizer states": states,
        "gradients under way": staging,
        "weights of a pass": whole,
        "8-bit weights": eight_bits,
        "activations": activations,
    }
    parts = " + ".join(f"{kind} {size_text(size)}" for kind, size in kinds.items() if size)
    return f"{size_text(sum(kinds.values()))} = {parts}"
