"""A record per optimizer: what rules, plan and optimizer ask about it. No other file branches on its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from patch.config.choices import MOMENT_BYTES, MomentType, OptimizerName
from patch.config.schema import OptimizerConfig

Moments = Mapping[str, MomentType]
"""The dtype of each moment of a weight, by the name of the state."""

MOMENTUM = "momentum_buffer"
OF_MATRICES: Moments = {MOMENTUM: "fp32"}
"""The moments of matrices that are updated whole."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """The facts about an optimizer."""

    name: str
    fields: tuple[str, ...]
    """The fields of OptimizerConfig that it reads, of those that some optimizer does not read."""
    first_decay: str
    """The field with the decay of the first moment."""
    moments: Callable[[OptimizerConfig], Moments]
    """The moments of weights that are updated by elements."""
    updates_whole_matrices: bool = False
    """Whether the matrices of layers are updated whole, and only other weights by elements."""


def _moments_of_adam(config: OptimizerConfig) -> Moments:
    return {"exp_avg": config.exp_avg_dtype, "exp_avg_sq": config.exp_avg_sq_dtype}


def _moments_of_sgd(config: OptimizerConfig) -> Moments:
    return {"exp_avg": config.exp_avg_dtype} if config.sgd_momentum else {}


_OF_ADAM = ("adam_beta1", "adam_beta2", "adam_eps", "decoupled_weight_decay")
_OF_MUON = tuple(name for name in OptimizerConfig.__slots__ if name.startswith("muon"))

OPTIMIZERS: dict[OptimizerName, Optimizer] = {
    "adam": Optimizer("AdamW", _OF_ADAM, "adam_beta1", _moments_of_adam),
    "sgd": Optimizer("SGD", ("sgd_momentum",), "sgd_momentum", _moments_of_sgd),
    "muon": Optimizer("Muon", _OF_ADAM + _OF_MUON, "adam_beta1", _moments_of_adam, True),
}


def optimizer_of(config: OptimizerConfig) -> Optimizer:
    """Return the record of a run's optimizer."""
    return OPTIMIZERS[config.optimizer]


def moment_bytes(config: OptimizerConfig) -> float:
    """Return the bytes of the moments of a weight that is updated by elements."""
    return _bytes_of(optimizer_of(config).moments(config))


def bytes_saved_in_matrices(config: OptimizerConfig) -> float:
    """Return by how many bytes the moments are smaller for a weight of a matrix that is updated whole."""
    is_saved = optimizer_of(config).updates_whole_matrices
    return moment_bytes(config) - _bytes_of(OF_MATRICES) if is_saved else 0


def _bytes_of(moments: Moments) -> float:
    return sum(MOMENT_BYTES[kind] for kind in moments.values())
