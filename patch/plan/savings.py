"""The ways to save memory: what each changes, and which memory it frees.

A saving is a row of `SAVINGS`. `suggest` combines changes that a run does not have yet. `search` tries the
changes that a row lists for it. `advice` names the savings that free the memory that ran out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from patch.config import RunConfig
from patch.config.choices import Recompute, RecomputeMethod, ZeroStage
from patch.config.fields import FIELDS, with_values
from patch.config.flags import flag_words
from patch.config.positions import place_of, where
from patch.config.schema import OptimizerConfig
from patch.layout.pipeline_stages import stage_activations
from patch.plan.memory import weights_on_host

FRACTIONS = (0.25, 0.5, 0.75, 1.0)
"""Shares of optimizer states on the host."""
SMALL_BUCKET = 100_000_000
"""Elements of a bucket; ZeRO-2 has three staging buffers of a bucket's size."""
OFFLOAD_FOLDER = "OFFLOAD_FOLDER"
"""Placeholder of a folder on each machine's disk."""
SHORTEST_PIECE = 4096
"""Fewest tokens of a CP rank: shorter pieces do not hide messages."""


class Change(NamedTuple):
    """Values of fields that save memory."""

    kind: str
    """Name shared by alternatives, such as several values of a field."""
    values: tuple[tuple[str, Any], ...]
    """Field and value; None removes the run's value."""

    @property
    def flags(self) -> str:
        """Flags that make the change."""
        return " ".join(word for name, scalar in self._set for word in flag_words(FIELDS[name], scalar))

    @property
    def places(self) -> list[str]:
        """Positions and environment variables that make the change, with their values."""
        return [place for name, scalar in self._set if (place := place_of(name, scalar))]

    @property
    def _set(self) -> list[tuple[str, object]]:
        return [(name, FIELDS[name].to_scalar(value)) for name, value in self.values if value is not None]


Changes = tuple[Change, ...]


def changed(kind: str = "", /, **values: object) -> Change:
    """Return a change of fields; its kind is by default the first field."""
    return Change(kind or next(iter(values)), tuple(values.items()))


def with_changes(config: RunConfig, changes: Changes) -> RunConfig:
    """Return the run with changes; the last value of a field counts."""
    return with_values(config, **dict(chain.from_iterable(change.values for change in changes)))


class MemorySaving(NamedTuple):
    """A way to save memory; `changes` yields the changes that a run does not have yet."""

    changes: Callable[[RunConfig], Iterator[Change]]
    goes_to_host: bool = False
    """Whether it moves device memory to host memory."""
    frees_host: bool = False
    """Whether it frees host memory of a run that offloads states or has no device."""
    searched: Callable[[RunConfig], Sequence[Change]] = lambda config: ()
    """Changes that a search tries, in order of less memory. The first one undoes the run's own setting."""


def _sharding(config: RunConfig) -> Iterator[Change]:
    stage = config.zero_stage
    if config.state_group_size == 1:
        return
    if not stage.shards_states:
        yield changed(use_distributed_optimizer=True, data_parallel_sharding=None)
    if not stage.shards_gradients:
        yield changed(data_parallel_sharding=ZeroStage.GRADIENTS)
    if config.optimizer.reduce_bucket_size > SMALL_BUCKET:
        yield changed(reduce_bucket_size=SMALL_BUCKET)
    if not stage.shards_parameters:
        yield changed(data_parallel_sharding=ZeroStage.PARAMETERS)


def _searched_sharding(config: RunConfig) -> Sequence[Change]:
    flags = {"use_distributed_optimizer": True, "overlapped_distributed_optimizer": False}
    zero_1, zero_2 = changed(**flags, data_parallel_sharding=None), {"overlapped_distributed_optimizer": True}
    zero_3, small = {"data_parallel_sharding": ZeroStage.PARAMETERS}, {"reduce_bucket_size": SMALL_BUCKET}
    if config.num_weight_copies == 1:
        return [zero_1, changed(**zero_3)]
    return [zero_1, *(changed(**zero, **more) for zero in (zero_2, zero_3) for more in ({}, small))]


def _activations(config: RunConfig) -> Iterator[Change]:
    training, now = config.training, config.recompute
    if config.parallel.tensor_model_parallel_size > 1 and not config.parallel.sequence_parallel:
        yield changed(sequence_parallel=True)
    if training.micro_batch_size > 1:
        yield changed(micro_batch_size=1)
    if now is None and not training.cpu_offloading:
        yield changed(recompute_granularity="selective")
    if now != "full" and not training.cpu_offloading:
        yield changed("full", recompute_granularity="full")


def _searched_activations(config: RunConfig) -> Sequence[Change]:
    again = (changed(recompute_granularity=each) for each in ("selective", "full"))
    return [RecomputePlan().change, *again]


def _states_on_host(config: RunConfig) -> Iterator[Change]:
    """Other shares of the optimizer states in host memory; `auto` has moved what it can."""
    if config.optimizer.optimizer_offload_policy != "auto":
        yield from (_on_host(share) for share in FRACTIONS if share != share_on_host(config))


def _searched_on_host(config: RunConfig) -> Sequence[Change]:
    none = changed(
        optimizer_offload_policy=None, optimizer_offload_fraction=1.0,
        cpu_offloading_weights=False, cpu_offloading_weights_fraction=1.0,
    )  # fmt: skip
    has_shards = config.sharding is ZeroStage.PARAMETERS
    weights = [_weights_there(config, share) for share in FRACTIONS if has_shards]
    return [none, *map(_on_host, FRACTIONS), *weights]


def _on_host(fraction: float) -> Change:
    return changed(optimizer_offload_policy="static", optimizer_offload_fraction=fraction)


def _weights_on_host(config: RunConfig) -> Iterator[Change]:
    """Shares of weights and gradients in host memory, together with all states."""
    shares = (share for share in FRACTIONS if share != weights_on_host(config))
    yield from (_weights_there(config, share) for share in shares)


def _weights_there(config: RunConfig, share: float) -> Change:
    states = () if config.optimizer.optimizer_offload_policy == "auto" else _on_host(1.0).values
    is_new = config.state_group_size == 1 and config.sharding is not ZeroStage.PARAMETERS
    sharding = {"data_parallel_sharding": ZeroStage.PARAMETERS} if is_new else {}
    weights = {"cpu_offloading_weights": True, "cpu_offloading_weights_fraction": share}
    return changed("weights", **sharding, **dict(states), **weights)


def _states_on_disk(config: RunConfig) -> Iterator[Change]:
    if config.optimizer.optimizer_offload_policy and config.optimizer.offload_folder is None:
        yield changed(offload_folder=OFFLOAD_FOLDER)


def _smaller_parts(config: RunConfig) -> Iterator[Change]:
    """Changes to more ranks per replica."""
    parallel = config.parallel
    for factor in (2, 4, 8):
        if (tp_size := parallel.tensor_model_parallel_size * factor) <= parallel.nproc_per_node:
            yield changed(tensor_model_parallel_size=tp_size, sequence_parallel=True)
        pp_size = parallel.pipeline_model_parallel_size * factor
        yield changed(pipeline_model_parallel_size=pp_size)
        if config.sample_length // (cp_size := parallel.context_parallel_size * factor) >= SHORTEST_PIECE:
            yield changed(context_parallel_size=cp_size, cp_comm_type=None)
        if config.model.num_experts:
            ep_size = config.experts.expert_model_parallel_size * factor
            yield changed(expert_model_parallel_size=ep_size)


SAVINGS = (
    MemorySaving(_sharding, frees_host=True, searched=_searched_sharding),
    MemorySaving(_activations, searched=_searched_activations),
    MemorySaving(_states_on_host, goes_to_host=True, searched=_searched_on_host),
    MemorySaving(_weights_on_host, goes_to_host=True),
    MemorySaving(_states_on_disk, goes_to_host=True, frees_host=True),
    MemorySaving(_smaller_parts, frees_host=True),
)
"""Cheapest first."""


def share_on_host(config: RunConfig) -> float:
    """Return the share of the optimizer states that a run asks to offload."""
    optimizer = config.optimizer
    return optimizer.optimizer_offload_fraction if optimizer.optimizer_offload_policy else 0.0


def more_offload(config: OptimizerConfig) -> str:
    """Return the flags of optimizer offload that use less device memory."""
    policy = where("optimizer_offload_policy")
    if config.optimizer_offload_policy == "auto":
        return f"a larger {where('optimizer_offload_auto_threshold')}"
    return f"a larger {where('optimizer_offload_fraction')} or auto at {policy}"


class RecomputePlan(NamedTuple):
    """How the activations of each stage's layers are kept, recomputed or offloaded."""

    granularity: Recompute | None = None
    method: RecomputeMethod = "uniform"
    recomputed: int = 1
    """With full: layers per block (uniform) or per stage (block)."""
    offloaded: int = 0

    @classmethod
    def of(cls, config: RunConfig) -> RecomputePlan:
        """Return the mix of a run's largest stage."""
        training = config.training
        split = stage_activations(max(config.stage_layers), training)
        is_block = training.recompute_method == "block"
        recomputed = split.recomputed if is_block else training.recompute_num_layers
        return cls(config.recompute, training.recompute_method, recomputed, split.offloaded)

    @property
    def change(self) -> Change:
        """Change that gives a run this mix."""
        return changed(
            recompute_granularity=self.granularity, recompute_method=self.method,
            recompute_num_layers=self.recomputed, cpu_offloading=self.offloaded > 0,
            cpu_offloading_num_layers=self.offloaded or None,
        )  # fmt: skip

    @property
    def words(self) -> str:
        """The mix in words."""
        base: str = self.granularity or "none"
        if self.granularity == "full" and self.method == "block":
            base = f"full for {self.recomputed} of each stage's layers"
        elif self.granularity == "full" and self.recomputed > 1:
            base = f"full in blocks of {self.recomputed} layers"
        return f"{base}, {self.offloaded} of each stage's layers offloaded" if self.offloaded else base


def without_savings(config: RunConfig) -> RunConfig:
    """Return the run without what a search tries: ZeRO-1 on the device, all activations kept."""
    for saving in SAVINGS:
        config = with_changes(config, tuple(saving.searched(config)[:1]))
    return config
