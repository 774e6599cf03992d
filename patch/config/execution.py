"""How a model is computed, as building it needs to know (`RunConfig.execution`); no section of a run.

Imports neither torch nor megatron.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from patch.config.choices import (
    PRECISIONS,
    ContextCommunication,
    Fp8Format,
    Fp8Scaling,
    Precision,
    PrecisionFacts,
    Recompute,
    RecomputeMethod,
)
from patch.config.experts import ExpertsConfig
from patch.families.adapters import AdapterConfig

if TYPE_CHECKING:
    from patch.config.schema import RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8:
    """How the products of a model's layers are computed with precision fp8."""

    format: Fp8Format = "hybrid"
    recipe: Fp8Scaling = "tensorwise"
    num_first_in_bf16: int = 0
    """So many of the model's first layers have bf16 products."""
    num_last_in_bf16: int = 0
    keeps_weights: bool = False
    """Keep 8-bit weights from a step's first micro-batch to its last."""
    param_gather: bool = False
    """The optimizer's gather sends the layers' weights in 8 bits."""

    def layers(self, num_layers: int) -> range:
        """The layers of a model, counted from 0, whose products have 8 bits."""
        return range(self.num_first_in_bf16, num_layers - self.num_last_in_bf16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """How a model is computed: the settings that building it needs besides its shape and process groups.

    This is not a section of config.yaml: `RunConfig.execution` collects it from other sections. A program
    without a RunConfig creates its own.
    """

    precision: Precision = "bf16"
    fp8: Fp8 = Fp8()
    """Used with precision fp8 only."""
    sequence_parallel: bool = False
    tp_comm_overlap: bool | None = None
    stage_layers: tuple[int, ...] | None = None
    """Layers of each pipeline stage in the order in which a batch passes them, the same number of stages for
    each pipeline rank; None: one stage each, cut by `split_layers`."""
    num_micro_batches: int = 1
    """Micro-batches of one replica in one step; used by interleaved stages and by losses of experts only."""
    micro_batch_group: int | None = None
    """Micro-batches that pass a stage before its process changes to its next stage; None: as few as fit."""
    overlap_p2p_communication: bool = True
    overlap_p2p_communication_warmup_flush: bool = False
    recompute_granularity: Recompute | None = None
    recompute_method: RecomputeMethod = "uniform"
    recompute_num_layers: int = 1
    cpu_offloading: bool = False
    cpu_offloading_num_layers: int | None = None
    deterministic_mode: bool = False
    cp_comm_type: ContextCommunication | None = None
    """Needed with context parallelism only."""
    experts: ExpertsConfig = ExpertsConfig()
    """Used by a model with experts only."""
    adapter: AdapterConfig = AdapterConfig()

    @classmethod
    def of(cls, config: RunConfig) -> Execution:
        """The execution of a run, from fields of the same names in the run, its training or its layout."""
        places = (config, config.training, config.parallel)
        values = {name: next(getattr(p, name) for p in places if hasattr(p, name)) for name in cls.__slots__}
        fp8 = replace(config.training.fp8, keeps_weights=config.keeps_8_bit_weights)
        chosen = {"stage_layers": tuple(config.stage_layers), "recompute_granularity": config.recompute}
        return cls(**values | chosen | {"fp8": fp8})

    @property
    def facts(self) -> PrecisionFacts:
        """Sizes and dtypes of the precision."""
        return PRECISIONS[self.precision]
