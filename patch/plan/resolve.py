"""The automatic choices of a run, all of them, in the order in which they depend on each other.

AC=auto looks at: all kept; selective; the first layers of each stage offloaded, the others kept whole or with
selective; the first layers recomputed; all layers recomputed, also in blocks. Of each, the fewest layers that
fit. Costs are in forwards of a layer, by the time model (timing/layer_time.py): recomputation repeats one; an
offloaded layer costs what its copies take longer than the forward and backward beside which they run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from patch.checks.rules import is_legal
from patch.config import RunConfig, resolve_transformer_impl
from patch.config.choices import ContextCommunication, Sharding, ZeroStage
from patch.config.positions import where
from patch.device import MachineFacts
from patch.logger import get_logger
from patch.numbers import size_text
from patch.plan import memory
from patch.plan.fits import Found, Space, Way, best, heaviest_rank
from patch.plan.parameters import layer_kinds
from patch.plan.savings import Mix, changed, share_on_host, with_changes
from patch.plan.timing.communication import sent_bytes
from patch.plan.timing.layer_time import layer_times, tensor_ways, with_tensor_overlap
from patch.plan.timing.machine import Machine, machines_of

_logger = get_logger(__name__)

_MIB = 2**20
SELECTIVE_COST = 0.05
"""Share of a layer's forward, where the device's speed is not known: selective recomputation repeats no
product, but reads and writes memory."""
OFFLOAD_COST = 0.1
"""Share of a layer's forward, also where its copies are hidden, which take bandwidth from compute.
Assumed."""


def resolve_run(config: RunConfig, machine: MachineFacts) -> tuple[RunConfig, list[str]]:
    """Replace every `auto` of a run that has passed the rules.
    Returns:
        the run, and lines about what was looked at and chosen.
    """
    chosen: list[str] = []
    for choose in (
        resolve_tp_comm_overlap, resolve_transformer_impl,  # Transformer Engine's layers do not overlap
        resolve_sharding, lambda run, _: resolve_cp_comm_type(run), resolve_8_bit_weights,
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
    if config.frees_weights and not any(map(any, memory.units_of(config, None))):
        below = f"{where('param_persistence_threshold')} {optimizer.param_persistence_threshold}"
        yield f"{where('data_parallel_sharding')} parameters: all are below {below}, and stay whole"


def resolve_if_legal(config: RunConfig, machine: MachineFacts) -> RunConfig | None:
    """A run with its `auto` replaced; None if a rule refuses it."""
    return resolve_run(config, machine)[0] if is_legal(config, machine) else None


def with_sharding(config: RunConfig, sharding: Sharding) -> RunConfig:
    """The same run with another ZeRO stage, or with `auto`."""
    return with_changes(config, (changed("parallel", data_parallel_sharding=sharding),))


def resolve_sharding(config: RunConfig, machine: MachineFacts) -> tuple[RunConfig, list[str]]:
    """Replace `auto` by the ZeRO stage that suits the run.

    The first that fits: with several micro-batches a step ZeRO-1, which reduces once a step; ZeRO-2, which
    with one micro-batch sends as much; ZeRO-3. It is ZeRO-3 where weights are to lie in host memory. If none
    fits, it is ZeRO-2.

    Returns:
        the run with a stage instead of auto, and one line for each stage tried, with its memory.
    """
    if config.sharding != "auto":
        return config, []
    own = ZeroStage.OPTIMIZER if config.parallel.use_distributed_optimizer else ZeroStage.NONE
    stages = [ZeroStage.OPTIMIZER, ZeroStage.GRADIENTS, ZeroStage.PARAMETERS][config.num_micro_batches == 1 :]
    stages = [own] if config.num_state_shares == 1 else stages  # all stages need the same; DO allows this one
    stages = [ZeroStage.PARAMETERS] if config.optimizer.cpu_offloading_weights else stages
    ways = [Way((changed("parallel", data_parallel_sharding=stage),)) for stage in stages]
    is_auto = config.training.recompute_granularity == "auto"
    asked = with_changes(config, (Mix("full").change,)) if is_auto else config  # all that AC=auto can do
    seen: list[Found] = []
    space = Space(ways=ways, cost=lambda run: stages.index(run.zero_stage), is_bounded=True)
    found = best(asked, machine, space, seen)
    chosen = found[0].run.zero_stage
    if not found[0].fit.is_whole and ZeroStage.GRADIENTS in stages:
        chosen = ZeroStage.GRADIENTS
    lines = [
        f"--data-parallel-sharding auto: {each.run.zero_stage.name.lower()} needs "
        f"{size_text(each.fit.device_needed)} a rank" + (", chosen" if each.run.zero_stage is chosen else "")
        for each in seen
    ]
    return with_sharding(config, chosen), lines


def resolve_cp_comm_type(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """Replace `auto` by the way that suits the run; without context parallelism there is nothing to choose.

    It is a2a where CP divides the query heads of a TP rank and either a2a sends no more, or sequences are
    packed or have a window: then most messages around a ring are for ranks that do not need it, and
    the work of the ranks is not even. Otherwise it is p2p, which hides what it sends behind attention.

    Returns:
        the run with a way instead of auto, and a line about the choice.
    """
    parallel = config.parallel
    if parallel.cp_comm_type is not None or parallel.context_parallel_size == 1:
        return config, []
    model = config.model
    heads = model.num_attention_heads // parallel.tensor_model_parallel_size
    sent = {way: sent_bytes(config, way) for way in ("p2p", "a2a")}
    has_parts = config.is_packed or config.data.reset_attention_mask or model.window_size is not None
    is_possible = config.heads_divide_by_cp
    chosen: ContextCommunication = "p2p"
    if is_possible and (has_parts or sent["a2a"] <= sent["p2p"]):
        chosen = "a2a"
    a2a = f"a2a {sent['a2a'] / _MIB:.1f} MiB" if is_possible else f"a2a cannot share {heads} heads"
    line = (
        f"--cp-comm-type auto: for a layer and micro-batch a rank sends by p2p {sent['p2p'] / _MIB:.1f} MiB, "
        f"by {a2a}; {chosen} is chosen"
    )
    return with_changes(config, (changed("parallel", cp_comm_type=chosen),)), [line]


def resolve_tp_comm_overlap(config: RunConfig, machine: MachineFacts) -> tuple[RunConfig, list[str]]:
    """Replace `auto` on GPUs of known speed by what takes less time; elsewhere only CPUs overlap.

    In pieces layers are our own. In bf16 they are as fast as Transformer Engine's, which wait for messages.

    Returns:
        the run with a choice instead of auto, and a line about it.
    """
    device, asked = machines_of(config, machine), config
    if config.training.recompute_granularity == "auto":  # decided later, for these layers
        asked = with_changes(config, (Mix().change,))
    ways = {} if device is None else tensor_ways(asked, device)
    if config.parallel.tp_comm_overlap is not None or not ways:
        return config, []
    chosen = ways[True] < ways[False]
    line = (
        f"--tp-comm-overlap auto: by the plan a layer takes {1e3 * ways[True]:.2f} ms with messages in "
        f"pieces of products, {1e3 * ways[False]:.2f} without; they are {'' if chosen else 'not '}chosen"
    )
    return with_tensor_overlap(config, chosen), [line]


def resolve_8_bit_weights(config: RunConfig, machine: MachineFacts) -> tuple[RunConfig, list[str]]:
    """Keep no 8-bit weights where there is no memory for them; call before `resolve_activations`.

    With AC=auto there must be room while all activations are kept: recomputing a layer costs more than making
    its 8-bit weights again.

    Returns:
        the run with `--disable-parameter-transpose-cache` if they do not fit, and a line that says so.
    """
    if not config.keeps_8_bit_weights:
        return config, []
    is_auto = config.training.recompute_granularity == "auto"
    kept = with_changes(config, (Mix().change,)) if is_auto else config
    no_cache = changed("training", disable_parameter_transpose_cache=True)
    ways = [Way(()), Way((no_cache,))]
    if best(kept, machine, Space(ways=ways, cost=lambda run: not run.keeps_8_bit_weights))[0].run == kept:
        return config, []
    rank = heaviest_rank(kept, cuda=bool(machine.cuda_devices))
    line = (
        f"8-bit weights are made in each micro-batch: there is no room to keep {size_text(rank.eight_bits)} "
        f"beside the {size_text(rank.total - rank.eight_bits)} of a rank"
    )
    return with_changes(config, (no_cache,)), [line]


def resolve_weights(config: RunConfig, machine: MachineFacts) -> tuple[RunConfig, list[str]]:
    """Put as few weights into host memory as let the run fit; call after all that makes room on the device.

    Returns:
        the run with a share in place of `auto`, in hundredths, and a line about it.
    """
    optimizer = config.optimizer
    if not optimizer.cpu_offloading_weights or optimizer.cpu_offloading_weights_fraction is not None:
        return config, []

    most = int(round(100 * share_on_host(config), 6))  # of 0.57 it is 57
    shares = [(changed("optimizer", cpu_offloading_weights_fraction=n / 100),) for n in range(most + 1)]
    run = best(config, machine, Space(ways=[Way((), shares)], cost=lambda run: 0.0))[0].run
    least = run.optimizer.cpu_offloading_weights_fraction
    there = memory.host_bytes(run)
    line = (
        f"--cpu-offloading-weights-fraction auto: {least:g}, with {size_text(there.weights)} of a "
        f"rank's weights and {size_text(there.gradients)} of gradients in host memory"
    )
    return run, [line]


def resolve_activations(config: RunConfig, machine: MachineFacts) -> tuple[RunConfig, list[str]]:
    """Replace `auto` by the cheapest mix that fits, or by the smallest that fits the host.

    Returns:
        the run with the flags of a mix instead of auto, and lines about what was looked at.
    """
    if config.training.recompute_granularity != "auto":
        return config, []
    config = with_changes(config, (Mix().change,))
    # A simulated device has no speed.
    timed_on = machines_of(config, machine) if machine.cuda_devices else None
    seen: list[Found] = []
    space = Space(
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


def _ways(config: RunConfig, seen: list[Found]) -> Iterator[Way]:
    """All kept, selective, and each other kind with ever more layers, until one fits."""
    most = max(config.stage_layers)
    counts = range(1, most + 1)
    yield Way((Mix().change,))
    if seen[-1].fit.is_whole:
        return
    yield Way((Mix("selective").change,))
    yield Way((), [(Mix(offloaded=layers).change,) for layers in counts])
    yield Way((), [(Mix("selective", offloaded=layers).change,) for layers in counts])
    if most > 1:
        yield Way((), [(Mix("full", "block", layers).change,) for layers in counts[:-1]])
    for block in counts:
        if math.gcd(block, *config.stage_layers) == block:
            yield Way((Mix("full", recomputed=block).change,))
            if seen[-1].fit.is_whole:
                return


def _cost(config: RunConfig, timed_on: Machine | None) -> float:
    """Cost of a micro-batch in the largest stage: more than if all is kept, in forwards of a layer."""
    mix, num_layers = Mix.of(config), max(config.stage_layers)
    if mix.granularity == "full":
        return float(num_layers if mix.method == "uniform" else mix.recomputed)
    selective, offload = SELECTIVE_COST, num_layers + 1.0  # rather recompute all
    if timed_on is not None:
        times = layer_times(layer_kinds(config)[1], timed_on)  # of layers with experts
        forward = times.forward.total
        selective, offload = times.selective / forward, OFFLOAD_COST + times.offload / forward
    return (selective * num_layers if mix.granularity == "selective" else 0.0) + mix.offloaded * offload


def _line(found: Found, timed_on: Machine | None, *, is_chosen: bool) -> str:
    """A line about a mix."""
    fit, cost = found.fit, _cost(found.run, timed_on)
    host = "" if fit.is_on_host else ", which host memory has no room for"
    in_stage = f"({max(found.run.stage_layers)} in a stage)"
    costs = f", costs {cost:.1f} forwards of a layer {in_stage}" if cost else ""
    chosen = "" if not is_chosen else ", chosen" if fit.is_whole else ", chosen, although too much"
    return f"{Mix.of(found.run).words} needs {size_text(fit.device_needed)} a rank{host}{costs}{chosen}"
