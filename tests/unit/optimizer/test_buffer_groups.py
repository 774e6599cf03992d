"""Domains: experts of which half the ranks hold other values, and fp32 vectors beside bf16 matrices.

The oracle is plain torch: gradients are all-reduced over the group of each parameter, the norm is that of all
weights of the job, the update is torch's AdamW on fp32 masters.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed_runner import new_job, run_distributed
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from optimizer_runs import LR, build_optimizer, take_step

from patch.config.choices import ZeroStage
from patch.config.schema import OptimizerConfig
from patch.optimizer import OverlappedDistributedOptimizer, ParamGroup

pytestmark = pytest.mark.long

WORLD_SIZE = 4
NUM_STEPS, NUM_MICRO_BATCHES = 6, 2
CLIP_GRAD = 0.05
# fp32: two orders of rounding in Adam. bf16: the same, and at times the next of the 8-bit numbers near 0.2.
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 2e-3}
NORM_BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
CASES = [
    (zero_stage, dtype, num_copies, bucket_size)
    for zero_stage in ZeroStage
    for dtype in (torch.float32, torch.bfloat16)
    for num_copies, bucket_size in ((2, 300), (1, 400))
]
"""ZeRO stage, type of the matrices, ranks that hold copies of an expert, elements of a bucket."""

SIZES = tuple(
    f"{axis}_parallel_size" for axis in ("tensor_model", "pipeline_model", "expert_model", "expert_tensor")
)
LAYOUTS = (1, 2, 2, 1), (2, 1, 4, 1), (2, 1, 2, 2), (2, 1, 2, 1)


class Block(torch.nn.Module):
    """A norm in fp32, a matrix for all ranks and one of this rank's expert; sizes that no shard divides."""

    def __init__(self, dtype: torch.dtype, expert: int) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.rand(19))
        self.shared = torch.nn.Parameter((torch.randn(19, 19) / 5).to(dtype))
        experts = torch.randn(WORLD_SIZE, 19, 19) / 5
        self.expert = torch.nn.Parameter(experts[expert].to(dtype))
        self.expert.allreduce = False  # type: ignore[attr-defined]

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = (batch * self.gain).to(self.shared.dtype)
        return batch + torch.tanh(hidden @ self.shared @ self.expert).float()


class Model(torch.nn.Sequential):
    """Three blocks; forward gives the loss."""

    def __init__(self, dtype: torch.dtype, expert: int) -> None:
        torch.manual_seed(0)
        super().__init__(*(Block(dtype, expert) for _ in range(3)))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return super().forward(batch).square().mean() / (WORLD_SIZE * NUM_MICRO_BATCHES)

    def experts(self) -> list[torch.nn.Parameter]:
        return [p for name, p in self.named_parameters() if name.endswith("expert")]


def param_groups(model: Model, copies: dist.ProcessGroup) -> list[ParamGroup]:
    others = [p for name, p in model.named_parameters() if not name.endswith("expert")]
    return [
        ParamGroup([p for p in others if p.ndim > 1], 0.1),
        ParamGroup([p for p in others if p.ndim == 1], 0.0),
        ParamGroup(model.experts(), 0.1, data_parallel_group=copies),
    ]


def batches(rank: int) -> Iterator[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(NUM_STEPS):
        yield list(torch.randn(NUM_MICRO_BATCHES, 5, 19, generator=generator))


class Plain:
    """The oracle on one rank, a model beside it."""

    def __init__(self, model: Model, copies: dist.ProcessGroup) -> None:
        self.model, self.copies = model, copies
        self.masters = {p: p.detach().float().requires_grad_() for p in model.parameters()}
        self.experts = set(model.experts())
        groups = [
            {"params": [self.masters[p] for p in group.params], "weight_decay": group.weight_decay}
            for group in param_groups(model, copies)
        ]
        self.adamw = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))

    def take_step(self, micro_batches: list[torch.Tensor]) -> float:
        sums = {p: torch.zeros(p.shape) for p in self.masters}
        for batch in micro_batches:
            self.model.zero_grad()
            self.model(batch).backward()
            for parameter, total in sums.items():
                total += parameter.grad.float()
        squares = torch.zeros((), dtype=torch.float64)
        for parameter, total in sums.items():
            is_expert = parameter in self.experts
            dist.all_reduce(total, group=self.copies if is_expert else dist.group.WORLD)
            self.masters[parameter].grad = total
            num_holders = self.copies.size() if is_expert else WORLD_SIZE
            squares += total.double().square().sum() / num_holders
        dist.all_reduce(squares)
        norm = squares.sqrt().item()
        for master in self.masters.values():
            master.grad *= min(1.0, CLIP_GRAD / (norm + 1e-6))
        self.adamw.step()
        with torch.no_grad():
            for parameter, master in self.masters.items():
                parameter.copy_(master)
        return norm


def train(rank: int, case: tuple, copies: dist.ProcessGroup, expert: int) -> dict[str, Any]:
    """What a case found beside the oracle."""
    zero_stage, dtype, _, bucket_size = case
    model, plain = Model(dtype, expert), Plain(Model(dtype, expert), copies)
    groups, changes = param_groups(model, copies), {"clip_grad": CLIP_GRAD, "reduce_bucket_size": bucket_size}
    optimizer = build_optimizer(model, zero_stage, param_groups=groups, **changes)
    norms = []
    for micro_batches in batches(rank):
        norms.append((take_step(model, optimizer, micro_batches), plain.take_step(micro_batches)))
    gaps = {dtype: 0.0 for dtype in BOUNDS}
    with optimizer.full_weights():
        for ours, other in zip(model.parameters(), plain.model.parameters(), strict=True):
            gaps[ours.dtype] = max(gaps[ours.dtype], (ours - other).abs().max().item())
        experts = [p.detach().float().numpy() for p in model.experts()]
    alone = [bucket for bucket in optimizer.grad_buffer.buckets if bucket.buffer_group.group.size() == 1]
    return {
        "norms": norms, "gaps": gaps, "experts": experts, "bytes": optimizer.report().device_bytes,
        "in place": [bucket.buffer is not None and bucket.is_shard_final for bucket in alone],
    }  # fmt: skip


def run_cases(rank: int, world_size: int) -> dict[tuple, Any]:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    singles = [dist.new_group([other]) for other in range(world_size)]
    found = {}
    for case in CASES:
        num_copies = case[2]
        copies = pairs[rank // 2] if num_copies == 2 else singles[rank]
        found[case] = train(rank, case, copies, rank // num_copies)
    return found | {sizes: norms(rank, sizes) for sizes in LAYOUTS}


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    return run_distributed(run_cases, WORLD_SIZE)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_experts_and_types_train_as_in_plain_torch(ranks: list, case: tuple) -> None:
    dtype, num_copies = case[1:3]
    for found in (rank[case] for rank in ranks):
        assert bool(found["in place"]) is (num_copies == 1) and all(found["in place"])
        for ours, expected in found["norms"]:
            assert ours == pytest.approx(expected, rel=NORM_BOUND[dtype])
        bounds = {of: BOUNDS[dtype] if dtype is torch.bfloat16 else BOUNDS[of] for of in BOUNDS}
        assert all(gap < bounds[of] for of, gap in found["gaps"].items()), found["gaps"]
    for rank in range(WORLD_SIZE):
        copy = ranks[rank - rank % num_copies][case]["experts"]
        assert all(map(np.array_equal, ranks[rank][case]["experts"], copy))
    first, last = ranks[0][case]["experts"], ranks[-1][case]["experts"]
    assert not any(map(np.array_equal, first, last))


@pytest.mark.parametrize("dtype,states", [(torch.float32, 8), (torch.bfloat16, 10)], ids=str)
def test_states_of_each_type_take_their_own_bytes(ranks: list, dtype: torch.dtype, states: int) -> None:
    vectors, matrices = 3 * 19 * 8, 3 * 19 * 19 * states
    whole = {rank[ZeroStage.NONE, dtype, 2, 300]["bytes"] for rank in ranks}
    assert whole == {vectors + 2 * matrices}
    for zero_stage in (ZeroStage.OPTIMIZER, ZeroStage.GRADIENTS):
        for num_copies, size in ((2, 300), (1, 400)):
            held = sum(rank[zero_stage, dtype, num_copies, size]["bytes"] for rank in ranks)
            assert held == vectors + matrices + WORLD_SIZE // num_copies * matrices


def norms(rank: int, sizes: tuple[int, ...]) -> list[tuple[float, float]]:
    """Experts on the first pipeline stage, of which each tensor rank saw a part of the tokens.

    They are whole on their tensor-parallel ranks, as the other weights are on theirs.
    """
    new_job()
    parallel_state.initialize_model_parallel(**dict(zip(SIZES, sizes, strict=True)))
    groups = ProcessGroupCollection.use_mpu_process_groups()
    found = []
    for zero_stage in ZeroStage:
        model = Block(torch.float32, groups.ep.rank())
        model.expert.sequence_parallel = True  # type: ignore[attr-defined]
        model.expert.requires_grad_(groups.pp.rank() == 0)
        batch = torch.randn(5, 19, generator=torch.Generator().manual_seed(rank))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(model(batch).square().sum(), trained)
        optimizer = OverlappedDistributedOptimizer([model], OptimizerConfig(lr=LR), zero_stage, groups)
        optimizer.zero_grad(LR)
        model(batch).square().sum().backward()
        squares = torch.zeros((), dtype=torch.float64)
        for parameter, gradient in zip(trained, gradients, strict=True):
            dp, tp = groups.dp, groups.tp
            if parameter is model.expert:
                dp, tp = groups.expt_dp, groups.expt_tp
                dist.all_reduce(gradient, group=tp)
            dist.all_reduce(gradient, group=dp)
            if tp.rank() == 0:
                squares += gradient.double().square().sum() / dp.size()
        dist.all_reduce(squares)
        found.append((optimizer.step().grad_norm, squares.sqrt().item()))
    return found


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_the_norm_counts_experts_of_some_stages_once_on_their_own_tensor_ranks(ranks: list, sizes) -> None:
    for found in ranks:
        for ours, expected in found[sizes]:
            assert ours == pytest.approx(expected, rel=NORM_BOUND[torch.float32])
