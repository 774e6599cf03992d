"""Which product each linear layer of a model has: nf4, fp8, in Hugging Face's order, or plain."""

from __future__ import annotations

from contextlib import AbstractContextManager

from megatron.core.transformer.transformer_config import TransformerConfig

from patch.config.schema import RunConfig
from patch.model.fp8.product import Fp8Product, StepWeights
from patch.model.hf_numerics.layers import HFLinear
from patch.model.linear import PLAIN, Product
from patch.model.nf4_product import Nf4Product


class Products:
    """The products of a model's linear layers, the same object for all stages of a process.

    `is_aligned`: whether operations are in Hugging Face's order. Transformer Engine's layers have their own.
    """

    def __init__(self, config: RunConfig, upstream: TransformerConfig, *, is_aligned: bool) -> None:
        self._base, self._is_aligned = config.adapter.quantize_base, is_aligned
        self._recomputes = upstream.recompute_granularity == "selective"
        is_own = upstream.transformer_impl == "local"
        self._casting = config.casts.layers if is_own else range(0)
        self._step = StepWeights(
            config.training.fp8_format or "hybrid", keeps_weights=config.casts.are_kept,
            param_gather=config.training.fp8_param_gather,
        )  # fmt: skip

    def of(self, number: int, aligned: HFLinear | None, *, is_input_kept: bool) -> Product:
        """Return the product of a linear layer in layer `number` (from 1).

        Args:
            aligned: the product in Hugging Face's order; None: HFLinear.
            is_input_kept: whether another operation keeps the input for backward.
        """
        if self._base:
            return Nf4Product(self._base)
        if self.has_casts(number):
            # With AC=sel, backward recomputes the norms and the MLP's activation.
            return Fp8Product(self._step, keeps_input=is_input_kept or self._recomputes)
        return aligned or HFLinear() if self._is_aligned else PLAIN

    def of_experts(self) -> Product:
        """Return the product of the routed experts, which have one order of operations."""
        return Nf4Product(self._base) if self._base else PLAIN

    def has_casts(self, number: int) -> bool:
        """Return whether layer `number` (from 1) casts the inputs of its products."""
        return number - 1 in self._casting

    def unchanged_weights(self) -> AbstractContextManager[None]:
        """Return a context in which no weight changes, so that each is cast once."""
        return self._step.unchanged()
