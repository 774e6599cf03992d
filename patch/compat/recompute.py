"""Defect of megatron-core without Transformer Engine: recomputed norms raise a NameError.

megatron/core/tensor_parallel/random.py:635-636 treats `fp8=False` as fp8 (`fp8 is not None`), and fp8 uses
names that only Transformer Engine defines (588-596). TransformerLayer creates such an object for each
recomputed norm (transformer_layer.py:577, 672). Delete when megatron-core reads the flag's value.
"""

from __future__ import annotations

from megatron.core.tensor_parallel import random

_upstream_init = random.CheckpointWithoutOutput.__init__


def _init(self: random.CheckpointWithoutOutput, fp8: bool = False) -> None:
    _upstream_init(self, fp8)
    self.fp8 = fp8


def apply() -> None:
    """Let CheckpointWithoutOutput use the value of `fp8`, if Transformer Engine is not installed."""
    if not random.HAVE_TE:
        random.CheckpointWithoutOutput.__init__ = _init
