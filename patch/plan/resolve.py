"""The automatic choices of a run, in the order in which they depend on each other.

AC=auto tries: all layers kept; selective; the first layers of each stage offloaded, the other layers kept or
selective; the first layers recomputed; all layers recomputed, also in blocks. Of each it takes the fewest
layers that fit. Costs are in forwards of a layer, by timing/layer_time.py. Recomputation repeats one forward.
An offloaded layer costs the time by which its copies exceed the passes that hide them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from patch.checks.rules import is_legal
from patch.config import RunConfig
from patch.config.choices import Sharding, ZeroStage
from patch.config.fields import with_values
from patch.config.positions import where
from patch.device import MachineFacts
from patch.features.backends import resolve_transformer_impl
from patch.logger import get_logger
from patch.plan import memory
from patch.plan.fits import Candidates, SearchResult, SearchSpace, best, heaviest_rank
from patch.plan.parameters import layer_kinds
from patch.plan.savings import RecomputePlan, changed, share_on_host, with_changes
from patch.plan.timing.communication import sent_bytes
from patch.plan.timing.layer_time import layer_times, seconds_by_tp_overlap
from patch.plan.timing.machine import Machine, machines_of
from patch.text import size_text

_logger = get_logger(__name__)

_MIB = 2**20
SELECTIVE_COST = 0.05
"""Share of a layer's forward if the device's speed is unknown: selective recomputation repeats no product,
but reads and writes memory."""
OFFLOAD_COST = 0.1
"""Share of a layer's forward, even if copies are hidden: they take bandwidth from compute. Assumed."""


def resolve_run(config: RunConfig, machine: MachineFacts) -> tuple[RunConfig, list[str]]:
    """Return the run with every `auto` replaced, and lines about the choices; call after the rules."""
    chosen: list[str] = []
    for choose in (
        resolve_tp_comm_overlap, resolve_transformer_impl,  # Transformer Engine's layers do not overlap
        resolve_sharding, lambda run, _: resolve_cp_comm_type(run), resolve_cast_weights,
        resolve_activations, resolve_weights,
    ):  # fmt: skip
        config, lines = choose(config, machine)
        chosen += lines
    return config, [*chosen, *_remarks(config, machine)]


def _remarks(config: RunConfig, machine: MachineFacts) -> Iterator[str]:
    """Remarks on settings of a resolved run that have no effect at its sizes."""
    optimizer = config.optimizer
    is_offloading = optimizer.offload_folder is not None and optimizer.optimizer_offload_policy is not None
    if is_offloading and not memory.disk_bytes(config, machine):
        share = f"{where('optimizer_offload_host_share')} {optimizer.optimizer_offload_host_share:g}"
        yield f"{where('offload_folder')}: by plan host memory takes all states ({share}), and the disk none"
    if config.gathers_weights_per_pass and not any(map(any, memory.units_of(config, None))):
        below = f"{where('param_persistence_threshold')} {optimizer.param_persistence_threshold}"
        yield f"{where('data_parallel_sharding')} parameters: all are below {below}, and stay whole"


def resolve_if_legal(config: RunConfig, machine: MachineFacts) -> RunConfig | None:
    """Return the run with its `auto` replaced, or None if a rule refuses it."""
    return resolve_run(config, machine)[0] if is_legal(config, machine) else None


def _while_auto(config: RunConfig, plan: RecomputePlan) -> RunConfig:
    """The run with this recomputation if it has AC=auto, which is decided later."""
    return with_changes(config, (plan.change,) if config.training.recompute_granularity == "auto" else ())


def with_sharding(config: RunConfig, sharding: Sharding) -> RunConfig:
    """Return the run with another ZeRO stage, or with `auto`."""
    return with_values(config, data_parallel_sharding=sharding)


def resolve_sharding(config: RunConfig, machine: MachineFacts) -> tuple[RunConfig, list[str]]:
    """Replace `auto` by the first ZeRO stage that fits; ZeRO-2 if none fits.

    With several micro-batches the order begins with ZeRO-1, which reduces once a step. With one micro-batch
    it begins with ZeRO-2, which then sends as much as ZeRO-1. ZeRO-3 is last, or the only stage if weights
    are to lie in host memory.
    """
    if config.sharding != "auto":
        return config, []
    own = ZeroStage.OPTIMIZER if config.parallel.use_distributed_optimizer else ZeroStage.NONE
    stages = [ZeroStage.OPTIMIZER, ZeroStage.GRADIENTS, ZeroStage.PARAMETERS][config.num_micro_batches == 1 :]
    stages = [own] if config.state_group_size == 1 else stages  # all stages need the same; DO allows this one
    stages = [ZeroStage.PARAMETERS] if config.optimizer.cpu_offloading_weights else stages
    ways = [Candidates((changed(data_parallel_sharding=stage),)) for stage in stages]
    seen: list[SearchResult] = []
    space = SearchSpace(ways=ways, cost=lambda run: stages.index(run.zero_stage), is_bounded=True)
    found = best(_while_auto(config, RecomputePlan("full")), machine, space, seen)[0]
    is_lost = not found.fit.is_whole and ZeroStage.GRADIENTS in stages
    chosen = ZeroStage.GRADIENTS if is_lost else found.run.zero_stage
    lines = [
        f"--data-parallel-sharding auto: {each.run.zero_stage.name.lower()} needs "
        f"{size_text(each.fit.device_needed)} a rank" + (", chosen" if each.run.zero_stage is chosen else "")
        for each in seen
    ]
    return with_sharding(config, chosen), lines


def resolve_cp_comm_type(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """Replace `auto` of `--cp-comm-type`, if there is context parallelism.

    a2a is chosen if CP divides the query heads of a TP rank and either a2a sends no more, or sequences are
    packed or have a window. In the latter cases most messages around a ring reach ranks that do not need
    them, and the ranks' work is uneven. Otherwise p2p is chosen, which hides its messages behind attention.
    """
    parallel = config.parallel
    if parallel.cp_comm_type is not None or parallel.context_parallel_size == 1:
        return config, []
    model = config.model
    heads = model.num_attention_heads // parallel.tensor_model_parallel_size
    sent = {"p2p": sent_bytes(config, "p2p"), "a2a": sent_bytes(config, "a2a")}
    has_parts = config.is_packed or config.data.reset_attention_mask or model.window_size is not None
    has_parts = has_parts or model.attn_logit_softcapping is not None
    is_possible = config.heads_divide_by_cp
    chosen = "a2a" if is_possible and (has_parts or sent["a2a"] <= sent["p2p"]) else "p2p"
    a2a = f"a2a {sent['a2a'] / _MIB:.1f} MiB" if is_possible else f"a2a cannot share {heads} heads"
    line = (
        f"--cp-comm-type auto: for a layer and micro-batch a rank sends by p2p {sent['p2p'] / _MIB:.1f} MiB, "
        f"by {a2a}; {chosen} is chosen"
    )
    return with_values(config, cp_comm_type=chosen), [line]


def resolve_tp_comm_overlap(config: RunConfig, machine: MachineFacts) -> tuple[RunConfig, list[str]]:
    """Replace `auto` of `--tp-comm-overlap` on GPUs of known speed by the faster choice.

    If it stays `auto`, only CPUs overlap. Overlap needs this project's layers. In bf16 they are as fast as
    Transformer Engine's, which wait for messages.
    """
    device = machines_of(config, machine)
    layer = layer_kinds(_while_auto(config, RecomputePlan()))[1]
    ways = {} if device is None else seconds_by_tp_overlap(layer, device)
    if config.parallel.tp_comm_overlap is not None or not ways:
        return config, []
    chosen = ways[True] < ways[False]
    line = (
        f"--tp-comm-overlap auto: by the plan a layer takes {1e3 * ways[True]:.2f} ms with messages in "
        f"pieces of products, {1e3 * ways[False]:.2f} without; they are {'' if chosen else 'not '}chosen"
    )
    return with_values(config, tp_comm_overlap=chosen), [line]


def resolve_cast_weights(config: RunConfig, machine: MachineFacts) -> tuple[RunConfig, list[str]]:
    """Keep no cast weights (--disable-parameter-transpose-cache) if they do not fit.

    Call it before `resolve_activations`. With AC=auto they must fit while all activations are kept:
    recomputing a layer costs more than casting its weights again.
    """
    if not config.casts.are_kept:
        return config, []
    no_cache = (changed(disable_parameter_transpose_cache=True),)
    ways, kept = [Candidates(()), Candidates(no_cache)], _while_auto(config, RecomputePlan())
    space = SearchSpace(ways=ways, cost=lambda run: not run.casts.are_kept)
    if best(kept, machine, space)[0].run == kept:
        return config, []
    rank = heaviest_rank(kept, cuda=bool(machine.cuda_devices))
    casts = memory.cast_weight_bytes(kept, rank.pp_rank)
    line = (
        f"{config.training.precision} weights are quantized in every micro-batch: no room to keep "
        f"{size_text(casts)} beside the {size_text(rank.total - casts)} of a rank"
    )
    return with_changes(config, no_cache), [line]


def resolve_weights(config: RunConfig, machine: MachineFacts) -> tuple[RunConfig, list[str]]:
    """Put the fewest weights into host memory with which the run fits; call after all other choices."""
    optimizer = config.optimizer
    if not optimizer.cpu_offloading_weights or optimizer.cpu_offloading_weights_fraction is not None:
        return config, []

    most = int(round(100 * share_on_host(config), 6))  # 57 for 0.57
    shares = [(changed(cpu_offloading_weights_fraction=n / 100),) for n in range(most + 1)]
    run = best(config, machine, SearchSpace(ways=[Candidates((), shares)], cost=lambda run: 0.0))[0].run
    least = run.optimizer.cpu_offloading_weights_fraction
    there = memory.host_bytes(run)
    line = (
        f"--cpu-offloading-weights-fraction auto: {least:g}, with {size_text(there.weights)} of a "
        f"rank's weights and {size_text(there.gradients)} of gradients in host memory"
    )
    return run, [line]


def resolve_activations(config: RunConfig, machine: MachineFacts) -> tuple[RunConfig, list[str]]:
    """Replace AC=auto by the cheapest mix that fits, or by the smallest that fits the host."""
    if config.training.recompute_granularity != "auto":
        return config, []
    config = with_changes(config, (RecomputePlan().change,))
    # A simulated device has no speed.
    timed_on = machines_of(config, machine) if machine.cuda_devices else None
    seen: list[SearchResult] = []
    space = SearchSpace(
        ways=_ways(config, seen), cost=lambda run: _cost(run, timed_on), kind=lambda changes, _: changes
    )
    chosen = best(config, machine, space, seen)[0]
    if not chosen.fit.is_whole:
        _logger.warning(
            "--recompute-granularity auto: no mix fits the device, so this run may end out of memory: more "
            "PP, TP or CP, a smaller micro-batch or optimizer offload need less"
        )
    usable, whole = memory.usable_device_memory(config, machine), memory.device_memory(config, machine)
    speed = "speed unknown, so recomputation goes before offload"
    if timed_on is not None:
        seconds = layer_times(layer_kinds(config)[1], timed_on).forward.total
        speed = f"a layer's forward takes {1e3 * seconds:.1f} ms by plan"
    lines = [f"{size_text(usable)} of the {size_text(whole)} of a device may be used, {speed}"]
    lines += [_line(each, timed_on, is_chosen=each is chosen) for each in seen]
    return chosen.run, [f"--recompute-granularity auto: {line}" for line in lines]


def _ways(config: RunConfig, seen: list[SearchResult]) -> Iterator[Candidates]:
    """Yield recompute and offload candidates: keep all; if that does not fit, selective, then the others."""
    most = max(config.stage_layers)
    counts = range(1, most + 1)
    yield Candidates((RecomputePlan().change,))
    if seen[-1].fit.is_whole:
        return
    yield Candidates((RecomputePlan("selective").change,))
    yield Candidates((), [(RecomputePlan(offloaded=layers).change,) for layers in counts])
    yield Candidates((), [(RecomputePlan("selective", offloaded=layers).change,) for layers in counts])
    if most > 1:
        yield Candidates((), [(RecomputePlan("full", "block", layers).change,) for layers in counts[:-1]])
    for block in counts:
        if math.gcd(block, *config.stage_layers) == block:
            yield Candidates((RecomputePlan("full", recomputed=block).change,))
            if seen[-1].fit.is_whole:
                return


def _cost(config: RunConfig, timed_on: Machine | None) -> float:
    """Cost of a micro-batch in the largest stage beyond keeping everything, in forwards of a layer."""
    mix, num_layers = RecomputePlan.of(config), max(config.stage_layers)
    if mix.granularity == "full":
        return float(num_layers if mix.method == "uniform" else mix.recomputed)
    selective, offload = SELECTIVE_COST, num_layers + 1.0  # costlier than recomputing all layers
    if timed_on is not None:
        times = layer_times(layer_kinds(config)[1], timed_on)  # of layers with experts
        forward = times.forward.total
        selective, offload = times.selective / forward, OFFLOAD_COST + times.offload / forward
    return (selective * num_layers if mix.granularity == "selective" else 0.0) + mix.offloaded * offload


def _line(found: SearchResult, timed_on: Machine | None, *, is_chosen: bool) -> str:
    fit, cost = found.fit, _cost(found.run, timed_on)
    host = "" if fit.is_on_host else ", which host memory has no room for"
    in_stage = f"({max(found.run.stage_layers)} in a stage)"
    costs = f", costs {cost:.1f} forwards of a layer {in_stage}" if cost else ""
    chosen = "" if not is_chosen else ", chosen" if fit.is_whole else ", chosen, although too much"
    words = RecomputePlan.of(found.run).words
    return f"{words} needs {size_text(fit.device_needed)} a rank{host}{costs}{chosen}"
