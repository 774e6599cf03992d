"""The ways to save memory, each in one place: what it changes, and how it is said.

A saving is a row of `SAVINGS`. `cures` combines the changes that a run does not have yet, `search` those that
the row says it tries, `activation_choice` mixes of activations, and `advice` says what a run that ran out of
memory does not use yet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from patch.config import RunConfig
from patch.config.choices import OffloadPolicy, Recompute, RecomputeMethod, ZeroStage
from patch.config.fields import FIELDS
from patch.config.flags import flag_words
from patch.config.positions import place_of, where
from patch.config.schema import OptimizerConfig
from patch.layout.pipeline_stages import stage_activations
from patch.plan.memory import bytes_per_rank, weights_on_host

FRACTIONS = (0.25, 0.5, 0.75, 1.0)
"""Shares of optimizer states on the host."""
SMALL_BUCKET = 100_000_000
"""Elements; ZeRO-2 has three staging buffers of a bucket's size."""
OFFLOAD_FOLDER = "OFFLOAD_FOLDER"
"""A folder on a disk of each machine, which a user has to name."""
SHORTEST_PIECE = 4096
"""Tokens of a rank with CP: shorter pieces do not hide what travels."""


class Change(NamedTuple):
    """One way to save memory."""

    kind: str
    """One word for several values for the same purpose, which are alternatives."""
    values: tuple[tuple[str, str, Any], ...]
    """Section, field and value; a value of None takes back what the run has. Empty: cures leave it out."""
    words: str = ""
    """What advice after an out-of-memory says of it; "": nothing."""

    @property
    def flags(self) -> str:
        """The flags that make the change."""
        return " ".join(word for name, scalar in self._set for word in flag_words(FIELDS[name], scalar))

    @property
    def places(self) -> list[str]:
        """The positions and environment variables that make it too, with their values."""
        return [place for name, scalar in self._set if (place := place_of(name, scalar))]

    def applied(self, config: RunConfig) -> RunConfig:
        """The run with it."""
        for section, field, value in self.values:
            replaced = dataclasses.replace(getattr(config, section), **{field: value})
            config = dataclasses.replace(config, **{section: replaced})
        return config

    @property
    def _set(self) -> list[tuple[str, object]]:
        """The fields that it sets, and their values as they are written."""
        return [(name, FIELDS[name].to_scalar(value)) for _, name, value in self.values if value is not None]


def _nothing(config: RunConfig) -> Sequence[Change]:
    return ()


class MemorySaving(NamedTuple):
    """A way to save memory, with what a run does not use of it yet."""

    frees: frozenset[str]
    """"gradients", "states", "activations", "weights"; "host memory" of what lies there."""
    changes: Callable[[RunConfig, int], Iterator[Change]]
    """Of a run and the bytes of its device, 0 if they are not known."""
    goes_to_host: bool = False
    """Whether what it frees on the device lies in host memory."""
    searched: Callable[[RunConfig], Sequence[Change]] = _nothing
    """What a search tries, less memory from one to the next: the first takes back what a run has of it, the
    others are for a run without it."""


def _change(section: str, words: str = "", kind: str = "", **values: object) -> Change:
    return Change(kind or next(iter(values)), tuple((section, *pair) for pair in values.items()), words)


def _advice(value: str, field: str) -> Change:
    """Words without a change: `value` at the places of a field."""
    return Change(field, (), f"{value} at {where(field)}")


def _sharded_states(config: RunConfig, limit: int) -> Iterator[Change]:
    if config.num_state_shares > 1 and not config.zero_stage.shares_states:
        words = f"true at {where('use_distributed_optimizer')}"
        yield _change("parallel", words, use_distributed_optimizer=True, data_parallel_sharding=None)


def _sharded_gradients(config: RunConfig, limit: int) -> Iterator[Change]:
    if config.num_state_shares == 1:
        return
    if config.num_gradient_parts == 1:
        words = f"gradients at {where('data_parallel_sharding')}"
        yield _change("parallel", words, data_parallel_sharding=ZeroStage.GRADIENTS)
    if config.optimizer.reduce_bucket_size > SMALL_BUCKET:
        yield _change("optimizer", reduce_bucket_size=SMALL_BUCKET)


def _sharded_parameters(config: RunConfig, limit: int) -> Iterator[Change]:
    if config.num_state_shares > config.num_param_parts:
        words = f"parameters at {where('data_parallel_sharding')}" if config.num_gradient_parts > 1 else ""
        yield _change("parallel", words, data_parallel_sharding=ZeroStage.PARAMETERS)


def _searched_sharding(config: RunConfig) -> Sequence[Change]:
    zero_1 = _change(
        "parallel",
        use_distributed_optimizer=True,
        overlapped_distributed_optimizer=False,
        data_parallel_sharding=None,
    )
    zero_3 = _change("parallel", data_parallel_sharding=ZeroStage.PARAMETERS)
    if config.num_weight_copies == 1:
        return [zero_1, zero_3]
    small = ("optimizer", "reduce_bucket_size", SMALL_BUCKET)
    shared = [_change("parallel", overlapped_distributed_optimizer=True), zero_3]
    return [zero_1, *(each for zero in shared for each in (zero, Change(zero.kind, (*zero.values, small))))]


def _smaller_passes(config: RunConfig, limit: int) -> Iterator[Change]:
    if config.parallel.tensor_model_parallel_size > 1 and not config.parallel.sequence_parallel:
        yield _change("parallel", sequence_parallel=True)
    if config.training.micro_batch_size > 1:
        yield _change("training", f"a smaller {where('micro_batch_size')}", micro_batch_size=1)
    else:
        length = "max_padding_length" if config.data.dataset_type == "raw" else "seq_length"
        yield Change(length, (), f"a smaller {where(length)}")


def _recomputed(config: RunConfig, limit: int) -> Iterator[Change]:
    training, now = config.training, config.recompute
    if now != "full":
        yield _advice("full" if now else "selective (sel) or full", "recompute_granularity")
    elif training.recompute_method == "block" and not training.cpu_offloading:
        yield _advice("uniform", "recompute_method")
    if now is None and not training.cpu_offloading:
        yield _change("training", recompute_granularity="selective")
    if now != "full" and not training.cpu_offloading:
        yield _change("training", kind="full", recompute_granularity="full")


def _searched_activations(config: RunConfig) -> Sequence[Change]:
    kept = _change(
        "training",
        recompute_granularity=None,
        recompute_method="uniform",
        recompute_num_layers=1,
        cpu_offloading=False,
        cpu_offloading_num_layers=None,
    )
    again = [_change("training", recompute_granularity=each) for each in ("selective", "full")]
    return [kept, *again]


def _offloaded_activations(config: RunConfig, limit: int) -> Iterator[Change]:
    training = config.training
    recomputes_all = training.recompute_granularity == "full" and training.recompute_method == "uniform"
    if not training.cpu_offloading and not recomputes_all:
        yield _advice("true", "cpu_offloading")


def _fewer_8_bit_weights(config: RunConfig, limit: int) -> Iterator[Change]:
    if config.keeps_8_bit_weights:
        yield _advice("true", "disable_parameter_transpose_cache")


def _states_on_host(config: RunConfig, limit: int) -> Iterator[Change]:
    """Other shares of the optimizer states in host memory, in quarters; no words if all are there already.

    A process that has the whole model moved all states to the host before it failed, if it could begin.
    """
    optimizer = config.optimizer
    policy = optimizer.optimizer_offload_policy
    is_whole = config.world_size == config.data_parallel_size
    could_begin = not limit or bytes_per_rank(config).total <= limit
    on_host: dict[OffloadPolicy | None, bool] = {
        None: False,
        "static": optimizer.optimizer_offload_fraction == 1 or (is_whole and could_begin),
        "auto": is_whole or 0 < limit <= optimizer.optimizer_offload_auto_threshold,
    }
    if not on_host[policy]:
        yield Change("states", (), more_offload(optimizer))
    if policy == "auto":  # it takes what the device has no room for already
        return
    for fraction in FRACTIONS:
        if fraction != share_on_host(config):
            yield _on_host(fraction)


def _searched_states_on_host(config: RunConfig) -> Sequence[Change]:
    none = _change(
        "optimizer",
        optimizer_offload_policy=None,
        optimizer_offload_fraction=1.0,
        cpu_offloading_weights=False,
        cpu_offloading_weights_fraction=1.0,
    )
    is_possible = config.sharding is ZeroStage.PARAMETERS
    weights = [_weights_there(config, share) for share in FRACTIONS if is_possible]
    return [none, *map(_on_host, FRACTIONS), *weights]


def _weights_on_host(config: RunConfig, limit: int) -> Iterator[Change]:
    """Shares of weights and gradients in host memory, where all states are too."""
    words = f"true at {where('cpu_offloading_weights')}"
    if weights_on_host(config) < 1:
        yield Change("weights", (), words)
    for share in FRACTIONS:
        if share != weights_on_host(config):
            yield _weights_there(config, share)


def _weights_there(config: RunConfig, share: float) -> Change:
    states = () if config.optimizer.optimizer_offload_policy == "auto" else _on_host(1.0).values
    weights = _change("optimizer", cpu_offloading_weights=True, cpu_offloading_weights_fraction=share)
    is_new = config.num_state_shares == 1 and config.sharding is not ZeroStage.PARAMETERS
    sharding = _change("parallel", data_parallel_sharding=ZeroStage.PARAMETERS).values if is_new else ()
    return Change("weights", (*sharding, *states, *weights.values))


def _on_host(fraction: float) -> Change:
    return _change("optimizer", optimizer_offload_policy="static", optimizer_offload_fraction=fraction)


def _states_on_disk(config: RunConfig, limit: int) -> Iterator[Change]:
    if config.optimizer.offload_folder is None:
        yield _change("optimizer", f"a folder at {where('offload_folder')}", offload_folder=OFFLOAD_FOLDER)


def share_on_host(config: RunConfig) -> float:
    """The share of the optimizer states that a run asks to have in host memory."""
    optimizer = config.optimizer
    return optimizer.optimizer_offload_fraction if optimizer.optimizer_offload_policy else 0.0


def more_offload(config: OptimizerConfig) -> str:
    """The flags of optimizer offload that use less device memory."""
    policy = where("optimizer_offload_policy")
    if config.optimizer_offload_policy is None:
        return f"static or auto at {policy}"
    if config.optimizer_offload_policy == "auto":
        return f"a larger {where('optimizer_offload_auto_threshold')}"
    return f"a larger {where('optimizer_offload_fraction')} or auto at {policy}"


def less_offload(config: RunConfig) -> list[str]:
    """The settings of offload that use less host memory."""
    fields = {"static": "optimizer_offload_fraction", "auto": "optimizer_offload_auto_threshold"}
    policy = config.optimizer.optimizer_offload_policy
    found = [fields[policy]] if policy else []
    found += ["cpu_offloading_num_layers"] if config.training.cpu_offloading else []
    return [f"less offload (a smaller {where(field)})" for field in found]


def _smaller_parts(config: RunConfig, limit: int) -> Iterator[Change]:
    """More processes for each copy of the model, which cures name with their sizes."""
    parallel = config.parallel
    for factor in (2, 4, 8):
        if (tp_size := parallel.tensor_model_parallel_size * factor) <= parallel.nproc_per_node:
            yield _change("parallel", tensor_model_parallel_size=tp_size, sequence_parallel=True)
        pp_size = parallel.pipeline_model_parallel_size * factor
        yield _change("parallel", pipeline_model_parallel_size=pp_size)
        if config.sample_length // (cp_size := parallel.context_parallel_size * factor) >= SHORTEST_PIECE:
            yield _change("parallel", context_parallel_size=cp_size, cp_comm_type=None)
        if config.model.num_experts:
            ep_size = config.experts.expert_model_parallel_size * factor
            yield _change("experts", expert_model_parallel_size=ep_size)


SAVINGS = (
    MemorySaving(frozenset({"states"}), _sharded_states),
    MemorySaving(frozenset({"gradients", "states"}), _sharded_gradients, searched=_searched_sharding),
    MemorySaving(frozenset({"weights"}), _sharded_parameters),
    MemorySaving(frozenset({"activations"}), _smaller_passes),
    MemorySaving(frozenset({"activations"}), _recomputed, searched=_searched_activations),
    MemorySaving(frozenset({"activations"}), _offloaded_activations, goes_to_host=True),
    MemorySaving(frozenset({"weights"}), _fewer_8_bit_weights),
    MemorySaving(
        frozenset({"states"}), _states_on_host, goes_to_host=True, searched=_searched_states_on_host
    ),
    MemorySaving(frozenset({"gradients", "weights"}), _weights_on_host, goes_to_host=True),
    MemorySaving(frozenset({"host memory"}), _states_on_disk),
    MemorySaving(frozenset({"gradients", "states", "weights"}), _smaller_parts),
)
"""The cheapest first."""


class Mix(NamedTuple):
    """What becomes of the activations of each stage's layers."""

    granularity: Recompute | None = None
    method: RecomputeMethod = "uniform"
    recomputed: int = 1
    """With full: layers of a block (uniform) or of each stage (block)."""
    offloaded: int = 0

    @classmethod
    def of(cls, config: RunConfig) -> Mix:
        """The mix of a run, as its largest stage has it."""
        training = config.training
        split = stage_activations(max(config.stage_layers), training)
        is_block = training.recompute_method == "block"
        recomputed = split.recomputed if is_block else training.recompute_num_layers
        return cls(config.recompute, training.recompute_method, recomputed, split.offloaded)

    @property
    def words(self) -> str:
        """The mix in words."""
        base: str = self.granularity or "none"
        if self.granularity == "full" and self.method == "block":
            base = f"full for {self.recomputed} of each stage's layers"
        elif self.granularity == "full" and self.recomputed > 1:
            base = f"full in blocks of {self.recomputed} layers"
        return f"{base}, {self.offloaded} of each stage's layers offloaded" if self.offloaded else base


def with_mix(config: RunConfig, mix: Mix) -> RunConfig:
    """The same run with another mix."""
    training = dataclasses.replace(
        config.training,
        recompute_granularity=mix.granularity,
        recompute_method=mix.method,
        recompute_num_layers=mix.recomputed,
        cpu_offloading=mix.offloaded > 0,
        cpu_offloading_num_layers=mix.offloaded or None,
    )
    return dataclasses.replace(config, training=training)


def without_savings(config: RunConfig) -> RunConfig:
    """The run without what a search tries: sharded states on the device, all activations kept."""
    for saving in SAVINGS:
        for change in saving.searched(config)[:1]:
            config = change.applied(config)
    return config
