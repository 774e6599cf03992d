"""Measures how well tensor-parallel messages overlap with the matrix products of the same layer.

    python -m toolkits.benchmarks.tensor_parallel [--quick] [--json FILE]

Two ranks on one core each, in two network namespaces connected by a cable of limited speed (needs root and
iproute2). Products wait instead of computing. All contenders run alternately in the same two processes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from patch.compat.torch_internals import TorchDispatchMode
from patch.config.schema import RunConfig
from patch.device import DeviceContext
from patch.distributed.async_collectives import Pending
from patch.distributed.groups import initialize
from patch.distributed.tensor_group import GatheredRows, ReducedRows, ScatteredSums, TensorGroup
from patch.model import build_llama_model, initialize_weights, linear
from toolkits.benchmarks._contenders import run_config
from toolkits.benchmarks._measure import COMMUNICATION, COMPUTE, Rounds, time_on_ranks
from toolkits.benchmarks._report import Aim, Report, run_benchmark
from toolkits.benchmarks._rig import Cables, compare, way_of
from toolkits.benchmarks._runner import run_ranks

_CABLES = {"as long as compute": 1.0, "half as long": 0.5}
"""Name -> the time of communication alone, as a share of the time of compute alone."""
_MOST = 0.95
"""The largest share of upstream's time: what is on by default should be worth it."""
_TIMEOUT_S = 600
NUM_RANKS = 2
UPSTREAM, PLAIN, OVERLAPPED = "upstream", "ours: no overlap", "ours: overlap"
_CLASSES = {ColumnParallelLinear: linear.Column, RowParallelLinear: linear.Row}

_SHAPE = {
    "num_layers": 2, "hidden_size": 512, "ffn_hidden_size": 1536, "num_attention_heads": 8,
    "num_query_groups": 4, "kv_channels": 64, "vocab_size": 64,
}  # fmt: skip
_ROWS = 4
_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.mm.out}
_WAITING_FLOPS = 1e11
"""Floating-point operations a second of products that wait."""


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report."""
    return run_benchmark(_run, argv, rounds=(9, 3))


def _run(arguments: argparse.Namespace) -> Report:
    with Cables(NUM_RANKS) as cables:
        measured = run_ranks(measure, NUM_RANKS, _TIMEOUT_S, cables=cables, rounds=arguments.rounds)
    figures = {name: Rounds(found["rounds"]) for name, found in measured.items()}
    texts = [
        f"{name}: {way_of(measured[name])}\n\n{found.table('', UPSTREAM)}" for name, found in figures.items()
    ]
    aims = [
        Aim(f"{name}: {OVERLAPPED} / {UPSTREAM}", found.ratio(OVERLAPPED, UPSTREAM), _MOST)
        for name, found in figures.items()
    ]
    return Report("\n".join(texts), aims, [found.panel(name) for name, found in figures.items()], measured)


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
    """

    def __init__(self, config: RunConfig, context: DeviceContext, groups: ProcessGroupCollection) -> None:
        stages = build_llama_model(config.model, groups, context.device, config.execution)
        initialize_weights(stages, config.model, seed=1)
        (self._model,) = stages
        self._is_cut = config.parallel.sequence_parallel
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
        vars(linear)["TensorGroup"] = group
        hidden = self._hidden.clone().requires_grad_()
        angles = self._model.rotary_pos_emb(self._whole.shape[0] // _ROWS)
        with _WaitingProducts():
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


def tensor_parallel_run(*, is_cut: bool) -> RunConfig:
    """The run whose layers all contenders compute; `is_cut`: with sequence parallelism."""
    return run_config(
        256, **_SHAPE, nproc_per_node=NUM_RANKS, tensor_model_parallel_size=NUM_RANKS,
        sequence_parallel=is_cut, tp_comm_overlap=True, micro_batch_size=_ROWS, global_batch_size=_ROWS,
        precision="bf16",
    )  # fmt: skip


def measure(context: DeviceContext, rounds: int) -> dict[str, Any]:
    """Time all contenders in each setting; equal on both ranks.

    Args:
        context: the device of this rank.
        rounds: how often each contender takes a step.
    """
    groups = initialize(tensor_parallel_run(is_cut=False), context)
    found: dict[str, Any] = {}
    for layout, is_cut in (("TP", False), ("TP, SP", True)):
        contenders = Layers(tensor_parallel_run(is_cut=is_cut), context, groups).contenders()
        timed = {name: partial(time_on_ranks, call, context) for name, call in contenders.items()}
        for cable, share in _CABLES.items():
            found[f"{layout}, {cable}"] = compare(timed, rounds, share)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
