"""LoRA adapters (arXiv:2106.09685) of a rank's stages: the only trainable weights; base weights are frozen.

A linear layer with output W x returns W x + scale * B (A dropout(x)). Each Hugging Face tensor of a layer (q,
k, v; gate, up) is a part with its own A and B, as in PEFT. The A of all parts are one product. The B are one
block-diagonal matrix, whose rows have the order of W's rows.

An adapter's output is full, sharded or a partial sum over TP, as the layer's own output is. Collectives are
as wide as the LoRA rank:

    layer           A         A x             B         summed over TP once per step
    Column          full      all heads       rows      nothing, because A x's gradient is summed
    Column with SP  full      all-gather      rows      gradient of A, from a rank's tokens
    Row             columns   all-reduce      full      nothing
    Row with SP     columns   reduce-scatter  full      gradient of B, from a rank's tokens
    unsharded       full      -               full      with SP both gradients
    expert          as above  no collective   as above  full factors; the dispatcher communicates

Shapes: S sequence (S / TP per rank with SP), I inputs and O outputs of this rank, r LoRA rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from patch.config.schema import RunConfig
from patch.families import Kind
from patch.families.adapters import Adapter, AdapterConfig, adapters_of
from patch.families.weights import WeightRow
from patch.model.frozen import let_inputs_have_gradients
from patch.model.hf_numerics.layers import HFLinear

_AXES: dict[Kind, int] = {
    **dict.fromkeys((Kind.COLUMN_PARALLEL, Kind.JOINED_QKV, Kind.JOINED_GATE_UP), 0),
    Kind.ROW_PARALLEL: 1,
}
"""The axis along which TP shards A or B."""


_Message = Callable[[torch.Tensor], torch.Tensor]
_MESSAGES: dict[tuple[type[torch.nn.Module], bool], Callable[..., torch.Tensor]] = {
    (ColumnParallelLinear, True): partial(
        gather_from_sequence_parallel_region, tensor_parallel_output_grad=True
    ),
    (ColumnParallelLinear, False): copy_to_tensor_model_parallel_region,
    (RowParallelLinear, True): reduce_scatter_to_sequence_parallel_region,
    (RowParallelLinear, False): reduce_from_tensor_model_parallel_region,
}
"""The TP collective for A x, by the kind of a layer, and whether tokens are sharded (SP)."""


class _Sum(torch.autograd.Function):
    """output + scale * hidden @ second.T, in place where autograd allows it."""

    @staticmethod
    def forward(
        ctx: Any, output: torch.Tensor, hidden: torch.Tensor, second: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """[..., O] and [..., r] with [O, r] in; [..., O] out."""
        ctx.scale = scale
        ctx.save_for_backward(hidden, second)
        if output._is_view() or not output.is_contiguous():  # as megatron-core's collectives return
            output = output.clone(memory_format=torch.contiguous_format)
        else:
            ctx.mark_dirty(output)
        output.view(-1, len(second)).addmm_(hidden.flatten(0, -2), second.t(), alpha=scale)
        return output

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, second = ctx.saved_tensors
        rows, scaled = gradient.reshape(-1, len(second)), hidden.flatten(0, -2) * ctx.scale
        of_hidden = (rows @ second).mul_(ctx.scale).view(hidden.shape)
        return gradient if ctx.needs_input_grad[0] else None, of_hidden, rows.t() @ scaled, None


class _Factor(torch.nn.Module):
    def __init__(
        self, row: WeightRow, like: torch.Tensor, dtype: torch.dtype, tp_size: int, *, sees_part: bool
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(like.new_empty(row.shard_shape(tp_size), dtype=dtype))
        self.weight.allreduce = getattr(like, "allreduce", True)  # type: ignore[attr-defined]
        if row.kind in _AXES:
            set_tensor_model_parallel_attributes(self.weight, True, _AXES[row.kind], 1)
        else:
            self.weight.sequence_parallel = sees_part  # type: ignore[attr-defined]


class _Part(torch.nn.Module):
    def __init__(self, make: Callable[[WeightRow], _Factor], adapter: Adapter) -> None:
        super().__init__()
        self.lora_A, self.lora_B = make(adapter.a), make(adapter.b)


class Adapters(torch.nn.ModuleDict):
    """The adapters of a linear layer, by the names of its parts; some parts may have none.

    Data-parallel ranks (`groups`) have different dropout. `num_query_groups` sets the row order of merged
    QKV.
    """

    _order: torch.Tensor | None
    _send: _Message | None
    _dropout: float

    def __init__(
        self,
        layer: Any,
        adapters: Sequence[Adapter],
        config: AdapterConfig,
        groups: ProcessGroupCollection,
        num_query_groups: int,
    ) -> None:
        base, group = adapters[0].base, layer.tp_group
        is_of_experts = getattr(layer, "explicit_expert_comm", False)
        is_cut = layer.config.sequence_parallel and not is_of_experts
        make = partial(
            _Factor, like=layer.weight, dtype=layer.config.params_dtype, tp_size=group.size(),
            sees_part=is_cut or is_of_experts,
        )  # fmt: skip
        super().__init__({each.name: _Part(make, each) for each in adapters})
        self._scale, self._dropout, self._group = config.scale, config.lora_dropout, group
        self._send = None if is_of_experts or group.size() == 1 else _message(layer, is_cut=is_cut)
        self._of_gate_up = [
            f"{each.name}.lora_B.weight" for each in adapters if each.b.kind is Kind.JOINED_GATE_UP
        ]
        share = group.size() if adapters[0].b.kind in _AXES else 1
        names = {each.target: each.name for each in adapters}
        self._parts = [(names.get(target), shape[0] // share) for target, shape in base.hf.items()]
        """Per part: its name, or None without an adapter, and the rows of B."""
        order = None
        if base.kind is Kind.QKV:
            order = _order([rows for _, rows in self._parts], num_query_groups // share)
            order = order.to(layer.weight.device)
        self.register_buffer("_order", order, persistent=False)
        replicas = groups.expt_dp if is_of_experts else groups.dp_cp
        self._place = replicas.rank(), group.rank() if is_cut or base.kind is Kind.ROW_PARALLEL else 0
        """Ranks with the same place have the same input, so they need the same dropout."""

    def forward(self, output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        """Return the layer's output [..., O] plus the adapters' output, from the layer's input [..., I]."""
        first = [part.lora_A.weight for part in self._own()]
        if self._dropout and self.training:
            hidden = torch.cat([linear(self._with_zeros(input), weight) for weight in first], dim=-1)
        else:
            hidden = linear(input, torch.cat(first))
        if self._send is not None:
            hidden = self._send(hidden)
        sum_: torch.Tensor = _Sum.apply(output, hidden, self._second(), self._scale)
        return sum_

    def add_part(self, number: int, output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        """Return a part's output [..., O] plus its adapter's output, in PEFT's order of operations; at TP 1.

        Source: peft/tuners/lora/layer.py, Linear.forward.
        """
        name, _ = self._parts[number]
        if name is None:
            return output
        part: Any = self[name]
        taken = self._with_zeros(input) if self._dropout and self.training else input
        return output + linear(linear(taken, part.lora_A.weight), part.lora_B.weight) * self._scale

    def _own(self) -> list[Any]:
        return [*self.values()]

    def _second(self) -> torch.Tensor:
        known = dict(zip(self, (part.lora_B.weight for part in self._own()), strict=True))
        like = next(iter(known.values()))
        blocks = [known[name] if name else like.new_empty(rows, 0) for name, rows in self._parts]
        stacked = blocks[0] if len(blocks) == 1 else torch.block_diag(*blocks)
        return stacked if self._order is None else stacked[self._order]

    def _with_zeros(self, input: torch.Tensor) -> torch.Tensor:
        """Apply dropout, seeded by the CPU generator, which resume and recomputation restore."""
        seed = int(torch.randint(2**62, ()))
        own = zlib.crc32(repr((seed, *self._place)).encode())
        generator = torch.Generator(input.device).manual_seed(own)
        kept = torch.empty_like(input).bernoulli_(1 - self._dropout, generator=generator)
        return input * kept.div_(1 - self._dropout)

    def sharded_state_dict(
        self, prefix: str, sharded_offsets: tuple[Any, ...], metadata: dict[str, Any]
    ) -> ShardedStateDict:
        """Return the adapters' shards, named and sharded like the layer's weight."""
        weights: dict[str, Any] = self.state_dict(keep_vars=True)
        axes = {
            name: weight.partition_dim
            for name, weight in weights.items() if getattr(weight, "tensor_model_parallel", False)
        }  # fmt: skip
        state: ShardedStateDict = make_sharded_tensors_for_checkpoint(
            weights, prefix, axes, sharded_offsets,
            tp_group=self._group, dp_cp_group=metadata["dp_cp_group"],
        )  # fmt: skip
        for name in self._of_gate_up:  # stored as gate, then up, whatever TP is
            state[prefix + name] = apply_swiglu_sharded_factory(state[prefix + name], sharded_offsets)
        return state


def _message(layer: Any, *, is_cut: bool) -> _Message | None:
    """Return the TP collective for A x."""
    for (kind, is_of_cut), message in _MESSAGES.items():
        if isinstance(layer, kind) and is_of_cut is is_cut:
            return partial(message, group=layer.tp_group)
    return None


def _order(sizes: list[int], num_groups: int) -> torch.Tensor:
    """Return the row indices that reorder stacked q, k and v into merged QKV, group by group."""
    ends = torch.tensor(sizes).cumsum(0).tolist()
    parts = [
        torch.arange(end - size, end).view(num_groups, -1) for size, end in zip(sizes, ends, strict=True)
    ]
    return torch.cat(parts, dim=1).flatten()


def add_adapters(stage: Any, run: RunConfig, groups: ProcessGroupCollection) -> None:
    """Freeze a stage (LlamaModel) and add adapters, which are not yet initialized."""
    model, config = run.model, run.adapter
    stage.requires_grad_(False)
    for base, found in groupby(adapters_of(model, config), key=lambda each: each.base):
        adapters = list(found)
        for layer in _layers_called(stage, base):
            layer.adapters = Adapters(layer, adapters, config, groups, model.num_query_groups)
            product: Any = getattr(layer, "product", None)
            is_aligned = isinstance(product, HFLinear) and product.num_parts == len(base.hf)
            # On several ranks the order of sums differs anyway, except in layers that are not cut.
            if is_aligned and (groups.tp.size() == 1 or base.kind is Kind.REPLICATED):
                product.adapt = layer.adapters.add_part
            else:
                layer.register_forward_hook(_add)
    stage.is_adapted = True
    let_inputs_have_gradients(stage, run)


def _layers_called(stage: Any, base: WeightRow) -> Iterator[Any]:
    """Yield the linear layers of a stage that a row of the weight table describes."""
    path = base.name.removeprefix("decoder.layers.*.").removesuffix(".weight")
    before, _, behind = path.partition(".#.")
    for layer in stage.decoder.layers:
        if layer.layer_number - 1 in base.layers:
            found = layer.get_submodule(before)
            yield from (expert.get_submodule(behind) for expert in found) if behind else (found,)


def _add(layer: Any, inputs: tuple[torch.Tensor], output: tuple[torch.Tensor, Any]) -> tuple[Any, Any]:
    """Forward hook of layers that return an output and a bias."""
    return layer.adapters(output[0], inputs[0]), output[1]
