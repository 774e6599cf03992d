"""Legal words of configuration fields, as types.

A field's annotation is the only list of its legal values. The parser, `--help` and YAML derive the values
from it (`fields.py`), and mypy refuses a comparison with any other word. A field that can be off is annotated
with `| None`; `flag(none=...)` in schema.py gives the command line's word for None.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Literal, NamedTuple

from patch.device import FloatType

Precision = Literal["fp32", "fp16", "bf16", "fp8"]
"""dtype of weights and activations; fp8 is bf16 with fp8 matmuls in the layers."""


class PrecisionFacts(NamedTuple):
    """Sizes and dtypes of a precision, for the plan's formulas, the model build and comparisons."""

    kept_as: FloatType
    """dtype of weights and activations, and of matmuls outside the layers."""
    weight_bytes: int
    factor_bytes: int
    """Bytes of an input element of the layers' matmuls."""
    master_bytes: int
    """Bytes of a master beyond the weight: fp16: an fp32 master; bf16: the master's low half."""
    update_bytes: int
    """Bytes that the optimizer kernel reads and writes beside moments: gradient 4, master and weight."""
    size_multiple: int = 1
    """Sizes of the layers' matmuls are multiples of this on a GPU; also on a CPU, which may resume there."""
    peak_factor: int = 1
    """Peak of the layers' matmuls over the bf16 peak, for every GPU that has such matmuls."""

    @property
    def has_casts(self) -> bool:
        """Whether layers cast the inputs of their matmuls to fewer bytes, each tensor with its scale."""
        return self.factor_bytes < self.weight_bytes

    @property
    def cast_bytes(self) -> int:
        """Bytes that the cast of an element reads (for the largest absolute value, and again) and writes."""
        return 2 * self.weight_bytes + self.factor_bytes if self.has_casts else 0


PRECISIONS: dict[Precision, PrecisionFacts] = {
    "fp32": PrecisionFacts("fp32", 4, 4, 0, 12),
    "fp16": PrecisionFacts("fp16", 2, 2, 4, 18),
    "bf16": PrecisionFacts("bf16", 2, 2, 2, 12),
    "fp8": PrecisionFacts("bf16", 2, 1, 2, 12, size_multiple=16, peak_factor=2),
}


class Casts(NamedTuple):
    """The layers of a run that cast the weights of their matmuls to fewer bytes (fp8); by default none."""

    layers: range = range(0)
    """Their indices, from 0."""
    are_kept: bool = False
    """Whether cast weights are kept during a step; only several micro-batches are worth the memory."""
    are_gathered: bool = False
    """Whether replicas all-gather cast weights: there are several replicas, and they share states."""
    has_old_scales: bool = False
    """Whether the scales come from earlier steps (delayed scaling, Transformer Engine)."""


RowKind = Literal["conversation", "pair", "unpaired"]
"""Kind of rows that an objective reads: a conversation (or a text), two answers to one prompt, or an answer
and whether it is desirable."""


class ObjectiveTraits(NamedTuple):
    """Traits of an objective, for the parts of a run that depend on them."""

    row_kind: RowKind = "conversation"
    has_reference: bool = False
    """Whether a pass over all sets before the first step gives log-probabilities of the start weights."""
    begins_with_forward: bool = False
    """Whether each step begins with one more forward, without gradients."""


_PREFERENCES = {
    "dpo": ObjectiveTraits("pair", has_reference=True),
    "orpo": ObjectiveTraits("pair"),
    "simpo": ObjectiveTraits("pair"),
    "kto": ObjectiveTraits("unpaired", has_reference=True, begins_with_forward=True),
}

ROW_KINDS: dict[str, RowKind] = {name: traits.row_kind for name, traits in _PREFERENCES.items()}
"""Objectives whose rows are not conversations."""


def objective_traits(name: str) -> ObjectiveTraits:
    """Return the traits of an objective; one that another program has registered has the defaults."""
    return _PREFERENCES.get(name, ObjectiveTraits())


PreferenceLoss = Literal["sigmoid", "ipo", "hinge", "robust"]
"""DPO losses of a pair's margin, with TRL's names (arXiv:2305.18290, 2310.12036, 2309.06657, 2403.00409)."""

Fp8Format = Literal["hybrid", "e4m3"]
"""fp8 types: e4m3 with gradients in e5m2 (more range, fewer digits), or e4m3 alone. Megatron-LM's names."""

Fp8Scaling = Literal["tensorwise", "delayed", "rowwise", "mxfp8", "blockwise"]
"""megatron-core's `Fp8Recipe`: the elements that share a scale. Only tensorwise and delayed are built."""

GradientType = Literal["fp32", "bf16"]
"""dtype in which gradients are accumulated and reduced."""

OptimizerName = Literal["adam", "sgd", "muon"]
"""Optimizers, with Megatron-LM's names; adam is AdamW."""

MuonScaleMode = Literal["spectral", "unit_rms_norm", "shape_scaling"]
"""Factors of Muon's rate by a matrix's shape, with Megatron-LM's names."""

MomentType = Literal["fp32", "bf16", "8bit"]
"""dtype in which an Adam moment is stored: bf16 is rounded stochastically, 8bit has a scale per block."""

MOMENT_BLOCK = 64
"""Adjacent elements of a row that share the fp32 scale of an 8-bit moment."""

MOMENT_BYTES: dict[MomentType, float] = {"fp32": 4, "bf16": 2, "8bit": 1 + 4 / MOMENT_BLOCK}
"""Bytes of one moment of a weight, including its share of a scale."""

Recompute = Literal["selective", "full"]
"""megatron-core's `recompute_granularity`."""

RecomputeChoice = Recompute | Literal["auto"]
"""A granularity, or `auto`: `patch.plan.resolve` chooses it by memory and cost."""

RecomputeMethod = Literal["uniform", "block"]
"""Layers that `full` recomputes: all, in blocks of several (uniform), or the first of each stage (block)."""

ContextCommunication = Literal["p2p", "a2a"]
"""Context-parallel communication: ring attention (p2p), or all-to-all over heads (a2a)."""

Decay = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
"""Decay of the learning rate after its warm-up. WSD (arXiv:2404.06395): constant, and a decay at the end."""

WsdDecay = Literal["exponential", "linear", "cosine", "minus_sqrt"]
"""Decay at the end of WSD."""

OffloadPolicy = Literal["static", "auto"]
"""Optimizer states in host memory: a fixed share, or the states that do not fit on the device."""

DatasetType = Literal["idxmap", "raw"]
"""idxmap: .bin/.idx files; raw: JSON rows."""

BuiltInTemplate = Literal["chatml", "llama3", "alpaca", "plain"]
"""Built-in chat templates, for models without a template."""

Service = Literal["wandb", "mlflow", "swanlab", "trackio"]

PushAs = Literal["private", "public", "update"]
"""Form of a push to the hub: a new repository, or a commit to an existing one."""

TrainOn = Literal["all", "last"]
"""Assistant turns that the loss mask covers."""

LongSamples = Literal["cut-end", "cut-begin", "split", "drop"]

InputJoin = Literal["newline", "empty"]
"""The text between alpaca's instruction and input."""

OnNonFinite = Literal["stop", "skip"]
"""How a run continues after a step with non-finite gradients."""

TokenizerType = Literal["PretrainedFromHF"]


class ZeroStage(IntEnum):
    """State that data-parallel ranks shard, by ZeRO stage (Rajbhandari et al., arXiv:1910.02054)."""

    NONE = 0
    """Nothing: gradients are all-reduced once a step."""
    OPTIMIZER = 1
    """Optimizer states; gradients are reduce-scattered once a step."""
    GRADIENTS = 2
    """Also gradients, which are reduce-scattered in every micro-batch."""
    PARAMETERS = 3
    """Also parameters, which are gathered for each pass and freed after it."""

    @property
    def shards_states(self) -> bool:
        """Whether a rank keeps the optimizer states of its own shards only."""
        return self >= ZeroStage.OPTIMIZER

    @property
    def shards_gradients(self) -> bool:
        """Whether a rank keeps gradient sums of its own shards only, so that every micro-batch is reduced."""
        return self >= ZeroStage.GRADIENTS

    @property
    def shards_parameters(self) -> bool:
        """Whether a rank keeps the parameters of its own shards only, so that every pass gathers them."""
        return self >= ZeroStage.PARAMETERS


Sharding = ZeroStage | Literal["auto"]
"""A ZeRO stage, or `auto`: `patch.plan.resolve` chooses the stage by its cost."""
