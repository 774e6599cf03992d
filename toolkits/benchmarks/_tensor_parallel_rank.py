"""One rank of `tensor_parallel`: a process that times the layers of a model with every contender.

python -m toolkits.benchmarks._tensor_parallel_rank '{"rank": 0, ...}'        the fields of Task, as JSON
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from patch import compat
from patch.config.schema import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainingConfig,
)
from patch.device import DeviceContext
from patch.distributed.async_collectives import Pending
from patch.distributed.groups import initialize, shutdown
from patch.distributed.tensor_group import GatheredRows, ReducedRows, ScatteredSums, TensorGroup
from patch.model import LlamaModel, build_llama_model, initialize_weights, overlapped_linear
from toolkits.benchmarks._link import limit_speed
from toolkits.benchmarks._overlap_figures import COMMUNICATION, COMPUTE

NUM_RANKS = 2
_FLOPS = 100e9
UPSTREAM, PIECES, OVERLAPPED = "upstream", "ours: no overlap", "ours: overlap"

_ON_CPU = ModelConfig(
    num_layers=2, hidden_size=512, ffn_hidden_size=1536, num_attention_heads=8, num_query_groups=4,
    kv_channels=64, vocab_size=64, seq_length=256, max_position_embeddings=256, rotary_base=500000.0,
    untie_embeddings_and_output_weights=True,
)  # fmt: skip
_ON_CUDA = ModelConfig(
    num_layers=4, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32, num_query_groups=8,
    kv_channels=128, vocab_size=64, seq_length=8192, max_position_embeddings=8192, rotary_base=500000.0,
    untie_embeddings_and_output_weights=True,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Task:
    """The work of one rank."""

    rank: int
    store: str
    """File of the FileStore through which the ranks find each other."""
    output: str
    """File for the results."""
    cuda: bool
    precision: str
    cables: dict[str, float]
    """Name -> how long communication takes as a share of compute; 0: the cable has no limit."""
    rounds: int
    waits: bool

    def to_json(self) -> str:
        """The argument of the process."""
        return json.dumps(asdict(self))


class _NoMessages(TensorGroup):
    """Sends nothing: what is received is whatever the memory holds."""

    def start_swap(self, step: int, sent: torch.Tensor, received: torch.Tensor) -> Pending:
        received.zero_()
        return Pending([])

    def start_all_reduce(self, buffer: torch.Tensor) -> Pending:
        return Pending([])


class WaitingProducts(TorchDispatchMode):
    """Matrix products wait instead of computing, as if an accelerator computed them; results are undefined."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in (torch.ops.aten.mm.default, torch.ops.aten.mm.out):
            return function(*args, **kwargs or {})
        (rows, inner), outputs = args[0].shape, args[1].shape[1]
        time.sleep(2 * rows * inner * outputs / _FLOPS)
        out = (kwargs or {}).get("out")
        return args[0].new_zeros(rows, outputs) if out is None else out.zero_()


class Layers:
    """The layers of a model, forward and backward, from random hidden states; no embedding, no loss.

    Args:
        config: the run.
        context: the device of this rank.
        is_cut: with sequence parallelism.
    """

    def __init__(self, config: RunConfig, context: DeviceContext, groups: Any, waits: bool) -> None:
        self._waits = waits
        self._model: LlamaModel
        (self._model,) = build_llama_model(config.model, groups, context.device, config.execution)
        initialize_weights([self._model], config.model, seed=1)
        self._is_cut = config.parallel.sequence_parallel
        self._linear = [m for m in self._model.modules() if isinstance(m, (ColumnParallelLinear, RowParallelLinear))]
        self._classes = [type(m) for m in self._linear]
        rows = config.training.micro_batch_size
        shape = (config.model.seq_length // (NUM_RANKS if self._is_cut else 1), rows, config.model.hidden_size)
        self._hidden = torch.randn(shape, device=context.device).to(self._model.config.params_dtype)
        self._whole = [ config.model.seq_length * rows, config.model.hidden_size]
        self._angles = self._model.rotary_pos_emb(config.model.seq_length)

    def contenders(self) -> dict[str, Callable[[], None]]:
        return {
            COMPUTE: lambda: self._run(OVERLAPPED, _NoMessages),
            COMMUNICATION: self._communicate,
            **{name: lambda name=name: self._run(name, TensorGroup) for name in (UPSTREAM, PIECES, OVERLAPPED, "1")},
        }

    def _run(self, name: str, group: type[TensorGroup]) -> None:
        upstream = {cls: cls.__mro__[1] for cls in self._classes if cls.__mro__[1] is not nn.Module}
        for module, cls in zip(self._linear, self._classes, strict=True):
            module.__class__ = upstream.get(cls, cls) if name == UPSTREAM else cls
        self._model.config.tp_comm_overlap = name == OVERLAPPED
        self._model.config.tp_comm_overlap = name in (OVERLAPPED,"1","4")
        import patch.distributed.tensor_group as TG
        TG._PIECES = {"1":1,"4":4}.get(name,2)
        vars(overlapped_linear)["TensorGroup"] = group
        hidden = self._hidden.clone().requires_grad_()
        with WaitingProducts() if self._waits else nullcontext():
          out = self._model.decoder(hidden, attention_mask=None, rotary_pos_emb=self._angles, packed_seq_params=None)
          out.backward(self._hidden)
        self._model.zero_grad()

    def _communicate(self) -> None:
        """The messages of `_run`, each pattern waited for."""
        group = TensorGroup(self._model.pg_collection.tp, is_overlapped=True)
        own, whole = self._hidden.flatten(0, 1), self._hidden.new_zeros(self._whole)
        for _ in range(self._model.config.num_layers):
            for pattern in 6 * [GatheredRows] + 4 * [ScatteredSums] if self._is_cut else 4 * [ReducedRows]:
                messages = pattern(own if pattern is GatheredRows else whole, group)
                for _ in messages.pieces():
                    pass
                messages.wait()


def run_config(task: Task, *, is_cut: bool) -> RunConfig:
    model = _ON_CUDA if task.cuda else _ON_CPU
    return RunConfig(
        model=model,
        parallel=ParallelConfig(
            nproc_per_node=NUM_RANKS, tensor_model_parallel_size=NUM_RANKS, sequence_parallel=is_cut,
            tp_comm_overlap=True,
        ),
        training=TrainingConfig(micro_batch_size=4, global_batch_size=4, train_iters=1, precision=task.precision),
        optimizer=OptimizerConfig(lr=1e-4),
        data=DataConfig(train_data_path="none", max_padding_length=model.seq_length),
        checkpoint=CheckpointConfig(output_path="none"),
    )


def run_rank(task: Task) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    context = DeviceContext.select(task.rank)
    compat.apply(cuda=context.is_cuda)
    store = dist.FileStore(task.store, NUM_RANKS)
    dist.init_process_group(context.backend, store=store, rank=task.rank, world_size=NUM_RANKS)
    groups = initialize(run_config(task, is_cut=False), context)
    found: dict[str, Any] = {}
    for layout, is_cut in (("TP", False), ("TP, SP", True)):
        layers = Layers(run_config(task, is_cut=is_cut), context, groups, task.waits)
        contenders = layers.contenders()
        for cable, share in task.cables.items():
            mbit = _set_speed(share, contenders, context)
            found[f"{layout}, {cable}"] = {"mbit": mbit, "rounds": _time_all(contenders, task.rounds, context)}
    shutdown()
    return found


def _set_speed(share: float, contenders: dict[str, Callable[[], None]], context: DeviceContext) -> float:
    if context.is_cuda:
        return 0.0
    if not share:
        limit_speed(1e5)
        return 1e5
    compute = min(_time(contenders[COMPUTE], context) for _ in range(6))
    mbit = 300.0
    for _ in range(3):
        limit_speed(mbit)
        mbit *= min(_time(contenders[COMMUNICATION], context) for _ in range(3)) / (compute * share)
    limit_speed(mbit)
    return mbit


def _time_all(contenders, rounds, context):
    names, measured = list(contenders), {name: [] for name in contenders}
    for name in names:
        contenders[name]()
    for index in range(rounds):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            measured[name].append({"seconds": _time(contenders[name], context)})
    return measured


def _time(step: Callable[[], None], context: DeviceContext) -> float:
    """Seconds of one step on the slower rank."""
    dist.barrier()
    begin = time.perf_counter()
    step()
    if context.is_cuda:
        torch.cuda.synchronize()
    slowest = torch.tensor(time.perf_counter() - begin, dtype=torch.float64, device=context.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


if __name__ == "__main__":
    given = Task(**json.loads(sys.argv[1]))
    measured = run_rank(given)
    if given.rank == 0:
        Path(given.output).write_text(json.dumps(measured), encoding="utf-8")
