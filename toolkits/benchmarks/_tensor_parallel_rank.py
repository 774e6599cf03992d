"""One rank of `tensor_parallel`: a process that times the layers of a model with every contender."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from patch.compat.torch_internals import TorchDispatchMode
from patch.config.choices import Precision
from patch.config.schema import ParallelConfig, RunConfig
from patch.device import DeviceContext
from patch.distributed.async_collectives import Pending
from patch.distributed.groups import initialize
from patch.distributed.tensor_group import GatheredRows, ReducedRows, ScatteredSums, TensorGroup
from patch.model import build_llama_model, initialize_weights, overlapped_linear
from patch.model.overlapped_linear import OverlappedColumn, OverlappedRow
from toolkits.benchmarks._link import limit_speed
from toolkits.benchmarks._overlap_figures import COMMUNICATION, COMPUTE
from toolkits.benchmarks._rank import run_as_rank, time_on_ranks
from toolkits.benchmarks._run_config import llama, run_config

NUM_RANKS = 2
UPSTREAM, PLAIN, OVERLAPPED = "upstream", "ours: no overlap", "ours: overlap"
_CLASSES = {ColumnParallelLinear: OverlappedColumn, RowParallelLinear: OverlappedRow}

_ON_CPU = llama(
    256, num_layers=2, hidden_size=512, ffn_hidden_size=1536, num_attention_heads=8, num_query_groups=4,
    kv_channels=64, vocab_size=64,
)  # fmt: skip
_ON_CUDA = llama(
    2048, num_layers=4, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32, num_query_groups=8,
    kv_channels=128, vocab_size=64,
)  # fmt: skip
_ROWS = 4
_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.mm.out}
_WAITING_FLOPS = 1e11
"""Floating-point operations a second of products that wait."""
_FIRST_MBIT, _MANY_TIMES = 300.0, 3


@dataclass(frozen=True, kw_only=True)
class Task:
    """The work of one rank."""

    cuda: bool
    waits: bool
    """Whether products wait instead of computing, as if an accelerator computed them."""
    precision: Precision
    cables: dict[str, float]
    """Name -> the time of communication alone as a share of compute alone; not used with CUDA."""
    rounds: int


class _WaitingProducts(TorchDispatchMode):
    """Matrix products sleep as long as an accelerator would compute, and are zero."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in _PRODUCTS:
            return function(*args, **kwargs or {})
        left, columns = args[0], args[1].shape[1]
        time.sleep(2 * left.numel() * columns / _WAITING_FLOPS)
        out = (kwargs or {}).get("out")
        return left.new_zeros(len(left), columns) if out is None else out.zero_()


class _Silent(TensorGroup):
    """Sends nothing, and receives zeros."""

    def start_swap(self, step: int, sent: torch.Tensor, received: torch.Tensor) -> Pending:
        received.zero_()
        return Pending([])

    def start_all_reduce(self, buffer: torch.Tensor) -> Pending:
        return Pending([])


class Layers:
    """The layers of a model, forward and backward from random hidden states; no embedding, no loss.

    Args:
        config: the run.
        context: the device of this rank.
        groups: the process groups of the job.
        waits: see `Task`.
    """

    def __init__(
        self, config: RunConfig, context: DeviceContext, groups: ProcessGroupCollection, *, waits: bool
    ) -> None:
        stages = build_llama_model(config.model, groups, context.device, config.execution)
        initialize_weights(stages, config.model, seed=1)
        (self._model,) = stages
        self._waits, self._is_cut = waits, config.parallel.sequence_parallel
        length, width = config.model.seq_length, config.model.hidden_size
        dtype = self._model.config.params_dtype
        self._whole = torch.randn(length * _ROWS, width, device=context.device).to(dtype)
        parts = NUM_RANKS if self._is_cut else 1
        self._hidden = self._whole.chunk(parts)[0].view(length // parts, _ROWS, width)

    def contenders(self) -> dict[str, Callable[[], None]]:
        """By name; each call is one forward and backward."""
        return {
            COMPUTE: partial(self._run, OVERLAPPED, _Silent),
            COMMUNICATION: self._communicate,
            **{name: partial(self._run, name, TensorGroup) for name in (UPSTREAM, PLAIN, OVERLAPPED)},
        }

    def _run(self, name: str, group: type[TensorGroup]) -> None:
        self._model.config.tp_comm_overlap = name == OVERLAPPED
        for module in self._model.decoder.modules():
            for upstream, ours in _CLASSES.items():
                if isinstance(module, upstream):
                    module.__class__ = upstream if name == UPSTREAM else ours
        vars(overlapped_linear)["TensorGroup"] = group
        hidden = self._hidden.clone().requires_grad_()
        angles = self._model.rotary_pos_emb(self._whole.shape[0] // _ROWS)
        with _WaitingProducts() if self._waits else nullcontext():
            out = self._model.decoder(hidden, None, rotary_pos_emb=angles, packed_seq_params=None)
            out.backward(self._hidden)
        self._model.zero_grad()

    def _communicate(self) -> None:
        """The messages of a step, each pattern waited for."""
        group = TensorGroup(self._model.pg_collection.tp, is_overlapped=True)
        own, product = self._hidden.flatten(0, 1), torch.zeros_like(self._whole)
        for _ in range(self._model.config.num_layers):
            for _ in range(6 * self._is_cut):
                GatheredRows(own, group).wait()
            for _ in range(4):
                sums = ScatteredSums(product, group) if self._is_cut else ReducedRows(product, group)
                for _ in sums.pieces():
                    pass
                sums.wait()


def tensor_parallel_run(task: Task, *, is_cut: bool) -> RunConfig:
    """The run whose layers all contenders compute; `is_cut`: with sequence parallelism."""
    parallel = ParallelConfig(
        nproc_per_node=NUM_RANKS, tensor_model_parallel_size=NUM_RANKS, sequence_parallel=is_cut,
        tp_comm_overlap=True,
    )  # fmt: skip
    model = _ON_CUDA if task.cuda else _ON_CPU
    return run_config(
        model, parallel, micro_batch_size=_ROWS, global_batch_size=_ROWS, precision=task.precision
    )


def measure(task: Task, context: DeviceContext) -> dict[str, Any]:
    """Time all contenders in each setting; equal on both ranks."""
    groups = initialize(tensor_parallel_run(task, is_cut=False), context)
    found: dict[str, Any] = {}
    for layout, is_cut in (("TP", False), ("TP, SP", True)):
        layers = Layers(tensor_parallel_run(task, is_cut=is_cut), context, groups, waits=task.waits)
        contenders = layers.contenders()
        for cable, share in task.cables.items():
            mbit = 0.0 if context.is_cuda else _set_speed(share, contenders, context)
            rounds = _time_all(contenders, task.rounds, context)
            found[f"{layout}, {cable}"] = {"mbit": mbit, "rounds": rounds}
    return found


def _set_speed(share: float, contenders: dict[str, Callable[[], None]], context: DeviceContext) -> float:
    """Set the cable's speed so that communication takes this share of compute's time."""

    def fastest(name: str) -> float:
        return min(time_on_ranks(contenders[name], context) for _ in range(_MANY_TIMES))

    compute, mbit = fastest(COMPUTE), _FIRST_MBIT
    for _ in range(_MANY_TIMES):  # headers and waits are a part of the time, so it is found step by step
        limit_speed(mbit)
        mbit *= fastest(COMMUNICATION) / (compute * share)
    limit_speed(mbit)
    return mbit


def _time_all(
    contenders: dict[str, Callable[[], None]], rounds: int, context: DeviceContext
) -> dict[str, list[dict[str, float]]]:
    """Time every contender in each round; each round begins with another contender."""
    names = list(contenders)
    for name in names:
        contenders[name]()
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for index in range(rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            measured[name].append({"seconds": time_on_ranks(contenders[name], context)})
    return measured


if __name__ == "__main__":
    run_as_rank(Task, measure)
