"""Upstream defect without Transformer Engine: recomputed norms end in a NameError.

megatron/core/tensor_parallel/random.py:635-636 takes `fp8=False` for fp8 (`fp8 is not None`), and fp8 asks
names that only Transformer Engine defines (588-596). TransformerLayer makes such an object for each
recomputed norm (transformer_layer.py:577, 672). Delete when upstream reads the flag's value.
"""

from __future__ import annotations

from megatron.core.tensor_parallel import random

_upstream_init = random.CheckpointWithoutOutput.__init__


def _init(self: random.CheckpointWithoutOutput, fp8: bool = False) -> None:
    _upstream_init(self, fp8)
    self.fp8 = fp8


def apply() -> None:
    """Let CheckpointWithoutOutput heed its flag where Transformer Engine is missing."""
    if not random.HAVE_TE:
        random.CheckpointWithoutOutput.__init__ = _init
