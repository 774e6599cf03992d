"""The plan as text: its rows with their formulas, and the lines at the start of a log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from patch.checks.run_length import is_counted_in_samples, num_train_samples, with_samples
from patch.config import RunConfig
from patch.config.choices import PRECISIONS, Recompute, objective_traits
from patch.config.schedule import learning_rate
from patch.device import MachineFacts
from patch.families import expert_layers, weight_rows
from patch.families.weights import TIED_OUTPUT
from patch.features.backends import choose_backends
from patch.features.optimizers import bytes_saved_in_matrices, moment_bytes, optimizer_of
from patch.plan import memory, parameters
from patch.plan.activations import activation_bytes, dispatch_of
from patch.plan.documents import formulas_of_documents
from patch.plan.fits import fit_of, heaviest_rank
from patch.plan.flops import channels_of_heads, flops_per_step, mean_pairs
from patch.plan.pipeline import Schedule
from patch.plan.savings import RecomputePlan
from patch.plan.timing.communication import group_of
from patch.preflight.checkpoint_places import newest_saved
from patch.storage.teacher_store import known_header
from patch.text import counted, scaled, size_text

INDENT = " " * 12
_AC_WORDS: dict[Recompute | None, str] = {None: "none", "selective": "sel", "full": "full"}


class PlanRow(NamedTuple):
    """A row of the plan."""

    lines: Sequence[str]
    """The first line begins with the subject, the other lines are indented."""
    formulas: Sequence[str] = ()

    @property
    def name(self) -> str:
        """Subject of the row."""
        return self.lines[0].partition(" ")[0]


def plan_rows(config: RunConfig, machine: MachineFacts) -> Iterator[PlanRow]:
    """Yield rows about ranks, parameters, bytes of a rank, a step, the whole run; and warnings."""
    papers = formulas_of_documents(config, cuda=bool(machine.cuda_devices))
    for rows in _TABLE:
        for row in rows(config, machine):
            yield row._replace(formulas=[*row.formulas, *papers.get(row.name, ())])


def describe_plan(config: RunConfig, machine: MachineFacts) -> str:
    """Return the lines of a plan without formulas."""
    return "\n".join(line for row in plan_rows(config, machine) for line in row.lines)


def _row(name: str, text: str, *formulas: str) -> PlanRow:
    return PlanRow([f"{name:<12}{text}"], formulas)


def _model(config: RunConfig, machine: MachineFacts) -> Iterator[PlanRow]:
    model, parallel, layers = config.model, config.parallel, config.stage_layers
    stages = config.virtual_pipeline_size
    experts = f"EP {config.experts.expert_model_parallel_size} x ETP {config.etp_size}"
    yield _row(
        "processes",
        f"{config.world_size} = TP {parallel.tensor_model_parallel_size} "
        f"x PP {parallel.pipeline_model_parallel_size} x CP {parallel.context_parallel_size} "
        f"x DP {config.data_parallel_size} on {counted(parallel.nnodes, 'machine')}"
        + (f", {stages} interleaved stages each" if stages > 1 else "")
        + (f", experts over {experts} x EDP {config.num_expert_copies}" if model.num_experts else ""),
    )
    if len(set(layers)) > 1:
        yield _row("layers", f"{model.num_layers} = {' + '.join(map(str, layers))} over the pipeline stages")
    total, active = (parameters.total_parameters(model, active=active) for active in (False, True))
    size = f"{scaled(total)} ({model.model_size})" + (f", {scaled(active)} active" if active < total else "")
    if rank := config.adapter.lora_rank:
        trained = parameters.trained_parameters(config)
        size += f"; adapters of rank {rank} train: {scaled(trained)} ({trained / total:.2%})"
    elif (trained := parameters.trained_parameters(config)) < total:
        size += f"; {scaled(trained)} train ({trained / total:.2%})"
    yield _row("parameters", size, *_shapes(config))
    if model.num_experts:
        yield _experts(config)


def _experts(config: RunConfig) -> PlanRow:
    model, experts, way = config.model, config.experts, dispatch_of(config)
    number, layers, visits = model.num_experts or 0, len(expert_layers(model)), model.moe_router_topk
    shared = " and a shared one" if model.moe_shared_expert_intermediate_size else ""
    of_rank = max(stage.model.experts for stage in parameters.of_stages(config))
    return _row(
        "experts",
        f"{number} in each of {counted(layers, 'layer')}, of which a token visits {visits}{shared}; "
        f"{number // experts.expert_model_parallel_size} on a rank, which sends {size_text(int(way.sent))} a "
        f"layer and micro-batch, and as much back ({way.words})",
        f"{of_rank} parameters of experts on the heaviest rank; {config.num_expert_copies} ranks have the "
        "same, and share their states if these are sharded",
        f"{way.rows:.0f} tokens of its own experts on a rank, if all are visited alike: {visits} x "
        f"{config.micro_batch_tokens} tokens of a micro-batch"
        + (f", ETP {config.etp_size}" if config.etp_size > 1 else ""),
    )


def _shapes(config: RunConfig) -> Iterator[str]:
    for row in weight_rows(config.model):
        if row.name == TIED_OUTPUT and not config.model.untie_embeddings_and_output_weights:
            continue
        times = f"{len(row.layers)} layers x " if row.is_per_layer else ""
        times += f"{row.num_experts} experts x " if row.num_experts > 1 else ""
        shapes = " + ".join(" x ".join(map(str, shape)) for shape in row.hf.values())
        yield f"{row.name}: {times}({shapes})"


def _state(config: RunConfig, machine: MachineFacts) -> Iterator[PlanRow]:
    """Model state of the heaviest rank, and of a checkpoint, which does not depend on the layout."""
    parallel, stage, state = config.parallel, config.zero_stage, memory.bytes_per_rank(config)
    host, instances = memory.host_bytes(config), parallel.num_distributed_optimizer_instances
    disk = memory.disk_bytes(config, machine) if host.optimizer else 0
    weights, gradients, optimizer = map(size_text, state)
    there = host.total - disk + memory.kept_weight_bytes(config, machine)
    elsewhere = [f"{size_text(there)} more in host memory"] if host.total else []
    elsewhere += [f"{size_text(disk)} on a disk"] if disk else []
    own = parameters.parameters_of(config, None)
    count, experts, in_4_bits = own.trained.total, own.trained.experts, own.in_4_bits.total
    beside = f", and {own.frozen} that do not train" if own.frozen else ""
    packed = f" + {in_4_bits} in nf4 = {own.packed.total} bytes" if in_4_bits else ""
    of_experts = f" ({experts} of experts / {config.num_expert_copies})" if experts else ""
    weight_parts, gradient_parts, state_parts = (
        f" / {config.state_group_size}{of_experts}" if shared else ""
        for shared in (config.gathers_weights_per_pass, stage.shards_gradients, stage.shards_states)
    )
    not_here = ", less what is on the host" if any(host[:2]) else ""
    if config.gathers_weights_per_pass:
        whole = sum(unit.total for unit in memory.units_of(config, None, as_kept=True))
        not_here = f" of the {size_text(whole)} in layers and vocabulary, the rest whole{not_here}"
    kind = PRECISIONS[config.training.precision]
    main = parameters.element_bytes(config.optimizer.main_grads_dtype)
    yield _row(
        "state/rank",
        f"{size_text(state.total)} = weights {weights} + gradients {gradients} + optimizer {optimizer}"
        + (f" ({', '.join(elsewhere)})" if elsewhere else "")
        + f" (data-parallel sharding: {stage.name.lower()}"
        + (f" in {instances} instances)" if instances > 1 else ")"),
        f"{count} parameters on the heaviest rank: of its stage, matrices and vocabulary over TP "
        f"{parallel.tensor_model_parallel_size}{beside}",
        f"weights: {count + own.dense} x {kind.weight_bytes} bytes{packed}{weight_parts}{not_here} = "
        f"{weights}",
        f"gradients: {count} x {main} bytes{gradient_parts} = {gradients}",
        f"optimizer: {count} x {memory.state_bytes(config):g} bytes{state_parts} (moments "
        f"{moment_bytes(config.optimizer):g}, and what a float32 master has beyond the weight), less what is "
        f"on the host = {optimizer}",
    )
    trained = parameters.trained_parameters(config)
    stored = trained if config.adapter.is_on else parameters.total_parameters(config.model)
    in_matrices = sum(row.num_elements * len(row.layers) for row in parameters.whole_matrices(config))
    saving = int(in_matrices * bytes_saved_in_matrices(config.optimizer))
    less = f", less {saving} bytes: {optimizer_of(config.optimizer).name} has one moment" if saving else ""
    folder = "adapter/" if config.adapter.is_on else "an export"
    saved = int(stored * kind.weight_bytes), int(trained * memory.state_bytes(config)) - saving
    of_frozen = f" + {stored - trained:.0f} frozen x {kind.weight_bytes}" if stored > trained else ""
    yield _row(
        "checkpoint",
        f"{size_text(sum(saved))} = weights {size_text(saved[0])} + optimizer {size_text(saved[1])}",
        f"{trained:.0f} parameters x ({kind.weight_bytes} + {memory.state_bytes(config):g} bytes)"
        f"{of_frozen}{less}; the weights alone are what {folder} takes",
    )


def _memory(config: RunConfig, machine: MachineFacts) -> Iterator[PlanRow]:
    """Activations, and memory of the heaviest rank; none with --precision-align, which keeps more."""
    if config.model.precision_align is not None:
        return
    cuda, tokens = bool(machine.cuda_devices), config.micro_batch_tokens
    dense, sparse = parameters.layer_kinds(config)
    others, kept = (activation_bytes(run, cuda=cuda) for run in (dense, sparse))
    texts = [
        ", ".join(f"{_AC_WORDS[setting]} {size_text(size)}" for setting, size in of_kind.items())
        for of_kind in (kept, others)
    ]
    yield _row(
        "activations",
        f"a layer and micro-batch keep {texts[0]} for backward"
        + (f" (without experts {texts[1]})" if dense is not sparse else "")
        + f"; this run: {RecomputePlan.of(config).words} (AC)",
        *(f"{key or 'none'}: {tokens} tokens x {n / tokens:.0f} bytes of a token" for key, n in kept.items()),
        "none keeps norms' inputs and outputs, q, k, v, attention's result, gate, up and their product",
        "sel leaves out what the norms give and the product; full keeps the layer's input",
    )
    rank, pp_size = heaviest_rank(config, cuda=cuda), config.parallel.pipeline_model_parallel_size
    most = rank.activations
    where = f" on pipeline rank {rank.pp_rank} of {pp_size}" if pp_size > 1 else ""
    in_flight = counted(most.in_flight, "micro-batch") + " in flight"
    if config.virtual_pipeline_size > 1:
        in_flight += f" through {config.virtual_pipeline_size} stages"
    parts = "".join(f"+ {name} {size_text(size)} " for name, size in rank.beside.items() if size)
    on_host = f"; {size_text(most.on_host)} more in host memory" if most.on_host else ""
    usable, whole = map(size_text, (memory.usable_device_memory(config, machine), machine.cuda_memory_bytes))
    yield _row(
        "memory/rank",
        f"{size_text(rank.total)} at most{where} = state {size_text(rank.state)} {parts}+ activations "
        f"{size_text(most.total)} ({in_flight}: layers {size_text(most.layers)}, loss, borders and RoPE "
        f"{size_text(most.ends)}, the running pass {size_text(most.transient)}{on_host})",
        "the running pass: layers that are computed again, gradients of gate and up, a chunk of logits, "
        "messages; the worst moment of a step counts",
        *([f"may use {usable} of {whole}: CUDA, NCCL and fragmentation need the rest"] if cuda else ()),
    )


def _bubble(config: RunConfig, machine: MachineFacts) -> Iterator[PlanRow]:
    schedule = Schedule.of(config)
    stages, count = f"VPP {schedule.vp_size} x ", schedule.num_micro_batches
    equal = f"({stages}{count} micro-batches)" if schedule.vp_size > 1 else f"{count} micro-batches"
    if schedule.pp_size > 1:
        yield _row(
            "bubble",
            f"{schedule.formula:.1%} of the computing time = (PP - 1) / {equal}, if all stages are equal",
            f"(p - 1) / (v m) = ({schedule.pp_size} - 1) / ({schedule.vp_size} x {count})",
        )


def _step(config: RunConfig, machine: MachineFacts) -> Iterator[PlanRow]:
    model, samples, length = config.model, config.training.global_batch_size, config.sample_length
    flops, tokens = flops_per_step(config), samples * length
    again = f", {scaled(flops.hardware)}FLOP with recomputation" if flops.hardware > flops.model else ""
    pairs, active = mean_pairs([length], model), parameters.active_elements(model)
    times, of_pairs = 3, f"{samples} x 4 x {model.num_layers} x {channels_of_heads(model)} x {pairs} pairs)"
    beside = "backward is twice forward"
    if config.adapter.is_on:
        times, of_pairs = 2, f"3 / 2 x {of_pairs[:-1]}) + 6 x {tokens} tokens x adapters that a token uses"
        beside = "backward of weights beside adapters is one forward, else twice"
    yield _row(
        "step",
        f"{samples} samples x {length} tokens = {tokens} tokens, "
        f"{counted(config.num_micro_batches, 'micro-batch')} a replica, {scaled(flops.model)}FLOP{again}",
        f"{times} x (2 x {tokens} tokens x ({model.num_layers} layers x {active} + output "
        f"{config.padded_vocab_size} x {model.hidden_size}) + {of_pairs} = {flops.model:.4g}",
        f"a multiply-add is 2 FLOPs, {beside}, attention counts the pairs under its mask",
    )
    if config.data.packing and config.data.dataset_type == "raw":  # .bin/.idx are not packed again
        packed = f"several rows share a sequence of {length} tokens"
        yield _row("packing", f"on: {packed}, a sample of the step is such a sequence")
    if config.row_kind != "conversation":
        traits = objective_traits(config.training.objective)
        parts = [f"each lies in one sequence of {length} tokens"]
        if traits.has_reference:
            once = "before the first step one forward over all sets gives their reference"
            parts.append(f"{once}, unless it is kept")
        if traits.begins_with_forward:
            parts.append("a step begins with one more forward")
        yield _row("pairs" if config.row_kind == "pair" else "answers", "; ".join(parts))
    if config.data.distill_from is not None:
        if header := known_header(config.data.distill_from):
            stored = (
                f"{header.teacher} has stored {size_text(header.num_bytes)}: {header.top_k} tokens and the "
                f"rest for each of {header.tokens} tokens with a loss, in {counted(header.rows, 'row')}"
            )
        else:
            stored = f"{config.data.distill_from} is not on this machine: its bytes are not counted"
        kernels = "; the loss has no fused kernel, torch computes it" if machine.cuda_devices else ""
        yield _row("teacher", stored + kernels)


def _run(config: RunConfig, machine: MachineFacts) -> Iterator[PlanRow]:
    training = config.training
    if machine.cuda_devices:
        yield _row("kernels", choose_backends(config, machine).line)
    tokens = training.train_iters * training.global_batch_size * config.sample_length
    steps = f"{training.train_iters} steps = {scaled(tokens)} tokens"
    if training.train_epochs is not None:
        steps = f"{_epochs(f'{training.train_epochs:g}')}; the steps follow from the training set"
    yield _row("run", steps)
    if training.train_epochs is None:
        yield _rates(config)
    if found := newest_saved(config):  # by its name only; completeness is not checked
        root, newest = found
        of_all = "" if is_counted_in_samples(config) else f" of {training.train_iters}"
        yield _row("resume", f"after step {newest}{of_all}, from {root}")


def shortages(config: RunConfig, machine: MachineFacts) -> dict[str, str]:
    """Return sentences about each memory that is too small, by "device" and "host"."""
    fit, device = fit_of(config, machine), memory.device_memory(config, machine)
    found: dict[str, str] = {}
    what = "model state" if config.model.precision_align is not None else "model state and activations"
    if 0 < device < fit.device_needed:
        name = "GPU" if machine.cuda_devices else "simulated device"
        found["device"] = f"{size_text(fit.device_needed)} of {what} on a {name} that has {size_text(device)}"
    if not fit.is_on_host:
        processes = counted(config.parallel.nproc_per_node, "process")
        of_host = "model state" if machine.cuda_devices else what
        needed = f"{size_text(fit.host_needed)} of {of_host} in the host memory of {processes}"
        found["host"] = f"{needed}, a machine has {size_text(fit.host_usable)}"
    return found


def _warnings(config: RunConfig, machine: MachineFacts) -> Iterator[PlanRow]:
    yield from (_row("warning", text) for text in shortages(config, machine).values())
    if (group := group_of(config, "tp")).nodes > 1:
        yield _row(
            "warning",
            f"TP {group.size} leaves the machine, which has {group.per_node} of a TP group: each layer waits "
            "for messages between machines. Use a smaller TP, and more PP or sharded states",
        )


def _rates(config: RunConfig) -> PlanRow:
    """Learning rates of a run whose steps are known."""
    iters, style = config.training.train_iters, config.optimizer.lr_decay_style
    steps = [max(1, round(share * iters / 4)) for share in range(5)]
    rates = ", ".join(f"{learning_rate(step, iters, config.optimizer):.3g}" for step in steps)
    return _row("rate", f"{rates} at 0, 25, 50, 75, 100 % of {counted(iters, 'step')} ({style})")


_TABLE = (_model, _state, _memory, _bubble, _step, _run, _warnings)


def _epochs(number: str) -> str:
    return f"{number} epoch" if number == "1" else f"{number} epochs"


def describe_length(config: RunConfig, one_pass: int) -> str:
    """Return a line about the steps and epochs of the run; `one_pass` samples are one epoch.

    If the run has a number of epochs, a second line has its learning rates.

    Raises:
        ConfigError: the epochs have fewer steps than the warm-up.
    """
    taken = num_train_samples(config, one_pass)
    resolved = with_samples(config, taken)
    steps = resolved.training.train_iters
    epochs = _epochs(f"{taken / one_pass:.3g}")
    asked = config.training.train_epochs
    is_more = asked is not None and taken > 1.5 * asked * one_pass
    why = f" ({asked:g} asked, but a step takes {config.training.global_batch_size})" if is_more else ""
    length = f"length      {counted(steps, 'step')} = {epochs} of {counted(one_pass, 'sample')}{why}"
    return length if asked is None else "\n".join([length, *_rates(resolved).lines])


def start_lines(config: RunConfig, machine: MachineFacts) -> list[str]:
    """Return the rows of a plan with which a run's log begins: layout, memory and steps."""
    rows = [row for part in (_model, _state, _memory, _step) for row in part(config, machine)]
    return [row.lines[0] for row in rows if row.name in ("processes", "state/rank", "memory/rank", "step")]
