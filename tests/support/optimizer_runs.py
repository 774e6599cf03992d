"""Train plain torch models with the optimizer, and with an oracle: autograd in one process and NumPy.

A batch is the argument of the model's forward, which returns the loss. `Step` is the data of one step: the
micro-batches of each data-parallel rank.
"""

import gc
import random
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import reduce
from itertools import product
from types import FunctionType, ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from stale_reads import no_stale_reads

from patch import compat
from patch.compat.overhead import shared_devices
from patch.config.choices import ZeroStage
from patch.config.schema import OptimizerConfig
from patch.distributed.groups import split_instances
from patch.memory.simulated_device import UNLIMITED, SimulatedDevice
from patch.optimizer import OverlappedDistributedOptimizer, ParamGroup
from patch.optimizer.kernels import adam_kernel
from patch.optimizer.kernels.numpy_adam import adam, round_to_bf16, sgd
from patch.optimizer.kernels.spec import AdamKernel, AdamScalars, UpdateItem
from patch.optimizer.states import host_update
from patch.optimizer.states.offload import Offload
from patch.optimizer.states.placement import DeviceMemory, Move, StaticPlacementPolicy

ZERO_STAGES = tuple(ZeroStage)
LR = 3e-3
RULES: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "Adam": {"decoupled_weight_decay": False},
    "SGD": {"optimizer": "sgd"},
}
Step = Sequence[Sequence[Any]]


class OddModel(torch.nn.Module):
    """975 elements: matrices (decayed), and vectors of 31 and 7 (not), none a multiple of 2, 3 or 4."""

    is_short = False
    """Whether the last layer is left out, so that forward does not wait for its weights."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(23, 31)
        self.last = torch.nn.Linear(31, 7)
        self.gain = torch.nn.Parameter(torch.rand(7))
        self.to(dtype)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the loss of inputs [B, 23]."""
        hidden = torch.tanh(self.first(batch))
        return (hidden if self.is_short else self.last(hidden) * self.gain).square().mean()


class WideModel(torch.nn.Module):
    """Matrices of 78,000 and, with the last gradient, 143,520 elements. Buckets of 2**16 cut both."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(24 * 23, 260, bias=False)
        self.last = torch.nn.Linear(260, 300)
        self.to(dtype)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the loss of inputs [B, 23]."""
        return self.last(torch.tanh(self.first(batch.repeat(1, 24)))).square().mean()


def make_steps(num_steps: int, dp_size: int, num_micro_batches: int, seed: int = 1) -> list[Step]:
    """Return inputs [4, 23] for every step, rank and micro-batch."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_steps, dp_size, num_micro_batches, 4, 23, generator=generator)
    return [[list(rank) for rank in step] for step in inputs]


def data_parallel_groups() -> ProcessGroupCollection:
    """Return the groups of a job that is only data-parallel."""
    compat.apply(cuda=False)
    if not parallel_state.is_initialized():
        with shared_devices():
            parallel_state.initialize_model_parallel()
    return ProcessGroupCollection.use_mpu_process_groups()


def build_optimizer(
    model: torch.nn.Module | list[torch.nn.Module],
    zero_stage: ZeroStage,
    *,
    num_instances: int = 1,
    offload: Offload | None = None,
    param_groups: Sequence[ParamGroup] | None = None,
    **changes: Any,
) -> OverlappedDistributedOptimizer:
    """Return the optimizer of a model, or of a list of stages, over all processes of the job.

    `changes` are fields of its configuration.
    """
    defaults = {"lr": LR, "clip_grad": 0.5, "reduce_bucket_size": 300, "param_persistence_threshold": 0}
    config = OptimizerConfig(**defaults | changes)
    groups = data_parallel_groups()
    split_instances(groups, num_instances)
    stages = model if isinstance(model, list) else [model]
    return OverlappedDistributedOptimizer(stages, config, zero_stage, groups, offload, param_groups)


def on_host(fraction: float, chunk_size: int = 100, host_bytes: int = UNLIMITED) -> Offload:
    """Return an offload of this share of the states to the host, beside a simulated device."""
    return Offload(SimulatedDevice(UNLIMITED), StaticPlacementPolicy(fraction), chunk_size, host_bytes)


def accumulate(
    model: torch.nn.Module, optimizer: OverlappedDistributedOptimizer, batches: Sequence, lr: float = LR
) -> None:
    """Run forward and backward of this rank's micro-batches, until every gradient is final."""
    optimizer.zero_grad(lr)
    for index, batch in enumerate(batches):
        is_last = index == len(batches) - 1
        with nullcontext() if is_last else optimizer.no_sync():
            # Later micro-batches find all weights gathered.
            with nullcontext() if index else no_stale_reads(optimizer):
                loss = model(batch)
            optimizer.scale_loss(loss).backward()
    optimizer.finish_grad_sync()
    assert all(parameter.grad is None for parameter in optimizer.parameters)


def take_step(model: torch.nn.Module, optimizer: OverlappedDistributedOptimizer, batches: Sequence) -> float:
    """Take one step; return the gradient norm. The new weights may still be in flight."""
    accumulate(model, optimizer, batches)
    return optimizer.step().grad_norm


def states_of(
    optimizer: OverlappedDistributedOptimizer, name: str
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return views of a state, each with a view of its weights, without padding."""
    found = []
    for index, shard in enumerate(optimizer.adam.shards):
        for part in shard.ranges:
            for begin, state in optimizer.adam.state(name, index, part.begin, part.end):
                found.append((state, shard.param[begin : begin + state.numel()]))
    return found


def weights_of(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Return float32 copies of all parameters; call it within `full_weights`."""
    return {name: parameter.detach().float().numpy().copy() for name, parameter in model.named_parameters()}


class Oracle:
    """AdamW, or another rule of RULES, on float32 arrays. It computes the gradients of all ranks itself.

    Args:
        model: a model of its own, never given to an optimizer: fp32, or bf16 with the arrays as masters.
        zero_stage: the order of sums: over the micro-batches of a rank, then over ranks; if gradients are
            sharded, over the ranks of a micro-batch, then over micro-batches.
        num_instances: number of groups of neighbouring ranks. Each group is summed, then the groups' sums.
        rounds: whether a rank rounds to bf16 what it sends.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        zero_stage: ZeroStage,
        clip_grad: float = 0.5,
        *,
        rule: str = "AdamW",
        num_instances: int = 1,
        rounds: bool = False,
    ) -> None:
        self.model, self._zero_stage, self._clip_grad = model, zero_stage, clip_grad
        self._rule, self._num_instances, self._rounds = rule, num_instances, rounds
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._step_count = 0
        self.masters = {name: p.detach().float().numpy().copy() for name, p in self._trained.items()}
        self.exp_avg = {name: np.zeros(p.shape, np.float32) for name, p in self._trained.items()}
        self.exp_avg_sq = {name: np.zeros(p.shape, np.float32) for name, p in self._trained.items()}

    def take_step(self, step: Step) -> float:
        """Take one step; return the gradient norm."""
        gradients = self.gradients(step)
        norm = float(np.sqrt(sum(np.square(g.astype(np.float64)).sum() for g in gradients.values())))
        scale = min(1.0, self._clip_grad / (norm + 1e-6)) if self._clip_grad > 0 else 1.0
        self._step_count += 1
        for name, parameter in self._trained.items():
            common = {"lr": LR, "weight_decay": 0.1 if parameter.ndim > 1 else 0.0, "grad_scale": scale}
            states = [self.masters[name], self.exp_avg[name], self.exp_avg_sq[name]]
            scalars = AdamScalars(
                beta1=0.9, beta2=0.95, eps=1e-8, step=self._step_count,
                decoupled_weight_decay=self._rule == "AdamW", **common,
            )  # fmt: skip
            if self._rule == "SGD":
                del states[2]
                updated = sgd(states[0], gradients[name], states[1], scalars=scalars)
            else:
                updated = adam(states[0], gradients[name], *states[1:], scalars)
            for old, new in zip(states, updated, strict=True):
                old[...] = new
            weight = self.masters[name]
            if parameter.dtype == torch.bfloat16:
                weight = round_to_bf16(weight).astype(np.uint32) << 16
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(weight.view(np.float32)))
        return norm

    def gradients(self, step: Step) -> dict[str, np.ndarray]:
        """Return the sums over ranks and micro-batches, with zeros for unused parameters."""
        size = len(step) // self._num_instances
        return _sum([self._of_instance(step[first : first + size]) for first in range(0, len(step), size)])

    def _of_instance(self, step: Step) -> dict[str, np.ndarray]:
        found = [[self._backward(batch) for batch in batches] for batches in step]
        if self._rounds:  # ZeRO-2 sends the gradients of each micro-batch, other stages their sum
            is_sum = not self._zero_stage.shards_gradients
            found = [[_rounded(part) for part in ([_sum(rank)] if is_sum else rank)] for rank in found]
        if self._zero_stage.shards_gradients:
            found = list(zip(*found, strict=True))
        return _sum([_sum(inner) for inner in found])

    def _backward(self, batch: Any) -> dict[str, np.ndarray]:
        self.model.zero_grad()
        self.model(batch).backward()
        return {
            name: np.zeros(p.shape, np.float32) if p.grad is None else p.grad.float().numpy().copy()
            for name, p in self._trained.items()
        }


def _sum(parts: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: reduce(np.add, [part[name] for part in parts]) for name in parts[0]}


def _rounded(part: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: torch.from_numpy(values).bfloat16().float().numpy() for name, values in part.items()}


def assert_same_weights(model: torch.nn.Module, oracle: Oracle, atol: float = 0.0) -> None:
    """Compare every parameter with the oracle's, bit for bit unless `atol` is given."""
    expected = weights_of(oracle.model)
    for name, ours in weights_of(model).items():
        np.testing.assert_allclose(ours, expected[name], rtol=0, atol=atol, err_msg=name)


def check_training(
    rank: int,
    zero_stage: ZeroStage,
    build: Callable[[], torch.nn.Module],
    steps: Sequence[Step],
    atol: float = 0.0,
    backward: Callable[[Any, OverlappedDistributedOptimizer, Sequence], None] = accumulate,
    **changes: Any,
) -> None:
    """Train a model and its oracle, and compare them after each step.

    `backward` may replace `accumulate`. `changes` are fields of the optimizer's configuration.
    """
    model, oracle = build(), Oracle(build(), zero_stage)
    optimizer = build_optimizer(model, zero_stage, **changes)
    for step in steps:
        backward(model, optimizer, step[rank])
        optimizer.step()
        oracle.take_step(step)
    with optimizer.full_weights():
        assert_same_weights(model, oracle, atol)


def failures_of(checks: Mapping[Any, Callable[[], object]]) -> dict[Any, str]:
    """Return the failure of each check on this rank, or "". A failure does not stop the later checks."""
    found = {}
    for name, check in checks.items():
        try:
            check()
            found[name] = ""
        except Exception:  # noqa: BLE001 - the check's own test reports it
            found[name] = traceback.format_exc()
        dist.barrier()
    return found


class SlowKernel:
    """Kernel of a slow host: the time of each call is multiplied by a random factor."""

    def __init__(self, *seconds: float) -> None:
        self._kernel, self._seconds = adam_kernel(torch.device("cpu")), seconds
        self._random = random.Random(0)

    def update(self, items: Sequence[UpdateItem]) -> None:
        time.sleep(self._random.choice(self._seconds))
        self._kernel.update(items)


@contextmanager
def host_kernel(kernel: AdamKernel) -> Iterator[None]:
    """Within the context, chunks on the host are updated by `kernel`."""
    with mock.patch.object(host_update, "adam_kernel", lambda device: kernel):
        yield


class RandomPolicy:
    """Moves each chunk to a random place before about half of the steps."""

    def __init__(self, seed: Any) -> None:
        self._random = random.Random(str(seed))
        self.num_moves = 0

    def moves(self, chunks: Sequence, memory: DeviceMemory) -> list[Move]:
        if self._random.random() < 0.5:
            return []
        wanted = [Move(chunk, self._random.random() < 0.7, "chance") for chunk in chunks]
        found = [move for move in wanted if move.to_host != move.chunk.is_on_host]
        self.num_moves += len(found)
        return found


WIDTH, DEPTH = 64, 8
NUMEL = DEPTH * WIDTH * WIDTH
BUCKET = 2 * WIDTH * WIDTH
"""Bucket size: four buckets without padding at DP 1, 2 and 4."""


class Layers(torch.nn.Module):
    """NUMEL parameters in matrices."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            *(torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype) for _ in range(DEPTH))
        )

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the loss of inputs [B, WIDTH]."""
        return self.layers(batch).square().mean()


def held_bytes(*roots: Any) -> int:
    """Return the bytes of all reachable tensors, each storage once. Hooks are followed, modules are not."""
    seen: dict[int, Any] = {}
    storages: dict[int, int] = {}
    stack = list(roots)
    while stack:
        found = stack.pop()
        if id(found) in seen or isinstance(found, (type, ModuleType)):
            continue
        seen[id(found)] = found  # kept alive, so that no id is used twice
        if isinstance(found, torch.Tensor):
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            stack.append(found.grad)
        # A function's globals lead to everything. Its own references are in its cells.
        stack += (found.__closure__ or ()) if isinstance(found, FunctionType) else gc.get_referents(found)
    return sum(storages.values())


def measure_zero_stages() -> dict[str, int]:
    """Return the bytes held after two steps, by ZeRO stage and dtype of the weights."""
    found = {}
    for zero_stage, dtype in product(ZERO_STAGES, (torch.bfloat16, torch.float32)):
        model = Layers(dtype)
        optimizer = build_optimizer(model, zero_stage, reduce_bucket_size=BUCKET)
        for _ in range(2):
            take_step(model, optimizer, [torch.ones(3, WIDTH, dtype=dtype)] * 2)
        optimizer.finish_param_sync()
        found[f"{zero_stage.name} {dtype}"] = held_bytes(model, optimizer)
    return found
