"""The legal words of configuration fields, as types.

A field's annotation is the only list of its legal values: the parser, `--help` and YAML derive theirs from
it (`fields.py`), and mypy refuses a comparison with a word that is not in it. A field that can be switched
off is annotated with `| None`; `flag(none=...)` in schema.py gives the word for that on a command line.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Literal, NamedTuple

from patch.device import FloatType

Precision = Literal["fp32", "fp16", "bf16", "fp8"]
"""Type of weights and activations; fp8 is bf16 with 8-bit products in the layers."""


class PrecisionFacts(NamedTuple):
    """Sizes and dtypes of a precision, for the formulas of the plan, for building and for comparing."""

    kept_as: FloatType
    """Type of weights and activations, and of products outside of layers."""
    weight_bytes: int
    """Bytes of a weight or an activation."""
    factor_bytes: int
    """Bytes of a number in the products of layers."""
    state_bytes: int
    """Bytes of a parameter's states: two fp32 moments; an fp32 master of fp16, a low half of one of bf16."""
    update_bytes: int
    """Bytes that the optimizer's kernel reads and writes: gradient 4, moments 16, master and weight."""

    @property
    def has_8_bits(self) -> bool:
        """Whether layers multiply numbers of 8 bits."""
        return self.factor_bytes == 1


PRECISIONS: dict[Precision, PrecisionFacts] = {
    "fp32": PrecisionFacts("fp32", 4, 4, 8, 28),
    "fp16": PrecisionFacts("fp16", 2, 2, 12, 34),
    "bf16": PrecisionFacts("bf16", 2, 2, 10, 28),
    "fp8": PrecisionFacts("bf16", 2, 1, 10, 28),
}

PreferenceLoss = Literal["sigmoid", "ipo"]
"""The loss of a pair's margin: TRL's names of the losses of DPO (arXiv:2305.18290, 2310.12036)."""

Fp8Format = Literal["hybrid", "e4m3"]
"""8-bit types: e4m3 with gradients in e5m2 (more range, fewer digits), or e4m3 alone. Megatron-LM's names."""

Fp8Scaling = Literal["tensorwise", "delayed", "rowwise", "mxfp8", "blockwise"]
"""Which numbers share a scale, and when it is made: megatron-core's `Fp8Recipe`; rowwise is refused."""

GradientType = Literal["fp32", "bf16"]
"""Type in which gradients are added up and reduced."""

MomentType = Literal["fp32", "bf16", "8bit"]
"""Type in which a moment of Adam is kept: bf16 is rounded stochastically, 8bit has a scale for each block."""

MOMENT_BLOCK = 64
"""Neighbouring elements of a row that share the fp32 scale of an 8-bit moment."""

MOMENT_BYTES: dict[MomentType, float] = {"fp32": 4, "bf16": 2, "8bit": 1 + 4 / MOMENT_BLOCK}
"""Bytes of one moment of a weight, its share of a scale included."""

Recompute = Literal["selective", "full"]
"""megatron-core's `recompute_granularity`."""

RecomputeChoice = Recompute | Literal["auto"]
"""One of them, or `auto`: `patch.plan.resolve` chooses by memory and cost."""

RecomputeMethod = Literal["uniform", "block"]
"""Which layers `full` recomputes: all, in blocks of several, or the first ones of each stage."""

ContextCommunication = Literal["p2p", "a2a"]
"""How context-parallel ranks exchange what attention needs: around a ring, or all-to-all over heads."""

OffloadPolicy = Literal["static", "auto"]
"""Which optimizer states lie in host memory: a fixed share, or what does not fit on the device."""

DatasetType = Literal["idxmap", "raw"]
"""Pre-training on .bin/.idx, or JSON rows."""

BuiltInTemplate = Literal["chatml", "llama3", "alpaca", "plain"]
"""Chat templates for models without one."""

Service = Literal["wandb", "mlflow", "swanlab", "trackio"]
"""Where metrics are reported (`--report-to`)."""

PushAs = Literal["private", "public", "update"]
"""How the exported model is pushed to the hub: as a new repository, or as a commit of an existing one."""

TrainOn = Literal["all", "last"]
"""The turns of the assistant that the loss covers."""

LongSamples = Literal["cut-end", "cut-begin", "split", "drop"]
"""How a conversation is treated that is longer than a sample."""

InputJoin = Literal["newline", "empty"]
"""The text between alpaca's instruction and input."""

OnNonFinite = Literal["stop", "skip"]
"""How a run goes on after a step whose gradients are not finite."""

TokenizerType = Literal["PretrainedFromHF"]
"""Where a tokenizer comes from."""


class ZeroStage(IntEnum):
    """The state that data-parallel ranks shard, by ZeRO's numbers (Rajbhandari et al., arXiv:1910.02054)."""

    NONE = 0
    """Nothing: every rank keeps all gradients and all optimizer states."""
    OPTIMIZER = 1
    """Optimizer states."""
    GRADIENTS = 2
    """Optimizer states and gradients."""
    PARAMETERS = 3
    """Optimizer states, gradients and parameters, which are gathered for each pass and freed after it."""

    @property
    def shares_states(self) -> bool:
        """Whether a rank keeps the optimizer states of its shards only."""
        return self >= ZeroStage.OPTIMIZER

    @property
    def shares_gradients(self) -> bool:
        """Whether a rank keeps the sums of its shards only, so that every micro-batch is reduced."""
        return self >= ZeroStage.GRADIENTS

    @property
    def shares_parameters(self) -> bool:
        """Whether a rank keeps its shards of parameters only, so that every pass gathers them."""
        return self >= ZeroStage.PARAMETERS

    def sums_on_the_way(self, num_copies: int) -> bool:
        """Whether gradients are all-reduced, which adds up in the dtype of the message.

        Args:
            num_copies: ranks with the same weights.
        """
        return not self.shares_states and num_copies > 1


Sharding = ZeroStage | Literal["auto"]
"""A stage, or `auto`: `patch.plan.resolve` chooses the stage by its cost."""
