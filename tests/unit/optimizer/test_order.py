"""Every wait of the optimizer, on a device that executes what it is given as late, or as early, as it may.

The product's own code runs on the fake device: hooks, buckets, weights, chunks, CudaDevice's streams.
What comes out must be what states on the device give where everything takes place at the call.
"""

import random
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed_runner import run_distributed
from fake_device import AT_ONCE, COMPUTE_FIRST, COPIES_FIRST, LATE, FakeDevice, Order
from fake_offload import FakeOffloadDevice, collectives_of, on
from optimizer_runs import (
    LR,
    OddModel,
    RandomPolicy,
    accumulate,
    data_parallel_groups,
    make_steps,
    states_of,
)

from patch.config.choices import ZeroStage
from patch.config.schema import OptimizerConfig
from patch.device import stream_of
from patch.layout.buckets import NUM_STAGING, NUM_STREAMED
from patch.memory.simulated_device import UNLIMITED
from patch.model.linear import PLAIN
from patch.optimizer import OverlappedDistributedOptimizer
from patch.optimizer.param_groups import ParamGroup
from patch.optimizer.states import offload as offload_module
from patch.optimizer.states.offload import Offload
from patch.optimizer.states.placement import DeviceMemory, Move, StaticPlacementPolicy, StreamedShare

pytestmark = pytest.mark.long

NUM_STEPS, CHUNK = 10, 90
ORDERS: tuple[Order, ...] = (LATE, COPIES_FIRST, COMPUTE_FIRST, 0, 1, 2)
CLIPPED, FREE = 0.3, 0.0
STREAMED = 0.0, None
"""Shares of the states on the host that the device updates, by the order of execution and the case; None: it
changes at random between steps."""
ALIKE, LONE, INSTANCES, ALONE = "alike", "lone", "instances", "alone"
CASES = [
    (ZeroStage.NONE, torch.bfloat16, FREE, ALIKE),
    (ZeroStage.OPTIMIZER, torch.float16, CLIPPED, LONE),
    (ZeroStage.GRADIENTS, torch.float32, FREE, LONE),
    (ZeroStage.GRADIENTS, torch.bfloat16, CLIPPED, INSTANCES),
    (ZeroStage.PARAMETERS, torch.bfloat16, CLIPPED, ALIKE),
    (ZeroStage.PARAMETERS, torch.float32, FREE, ALIKE),
    (ZeroStage.PARAMETERS, torch.bfloat16, FREE, ALONE),
]
"""ZeRO stage, dtype, clipping, and ranks with copies of the parameters: the same for all parameters; none for
some, such as experts; ranks in instances; or none for all."""
ON_HOST = CASES[-2:]
"""Where weights and gradients lie in host memory, but for the reference."""
TIGHT = 11 * CHUNK * 12
"""Host memory for the states, and hardly more: the buffers that updates share go round."""


def build(
    model: OddModel,
    zero_stage: ZeroStage,
    clip_grad: float,
    copies: str,
    offload: Offload | None,
    **changes: Any,
) -> OverlappedDistributedOptimizer:
    groups = data_parallel_groups()
    if copies != ALONE:
        groups.dp_cp = dist.ProcessGroup(1, 2)
    if copies == INSTANCES:
        groups.dp_cp, groups.intra_dp_cp = dist.ProcessGroup(3, 4), dist.ProcessGroup(1, 2)
        groups.inter_dist_opt = dist.ProcessGroup(1, 2)
    config = OptimizerConfig(
        lr=LR, clip_grad=clip_grad, reduce_bucket_size=200, initial_loss_scale=1024.0,
        param_persistence_threshold=20, **changes,
    )  # fmt: skip
    param_groups = None
    if copies == LONE:
        own = [*model.last.parameters(), model.gain]
        shared = [parameter for parameter in model.parameters() if all(parameter is not p for p in own)]
        alone = dist.ProcessGroup(0, 1)
        param_groups = [ParamGroup(shared, 0.1), ParamGroup(own, 0.0, data_parallel_group=alone)]
    optimizer = OverlappedDistributedOptimizer([model], config, zero_stage, groups, offload, param_groups)
    optimizer.schedule._can_wait_elsewhere = True
    assert len(optimizer.grad_buffer.buckets) > NUM_STAGING, "no message could overwrite another"
    return optimizer


def fail_midway(
    model: OddModel, optimizer: OverlappedDistributedOptimizer, batches: list[torch.Tensor]
) -> None:
    """A step whose backward ends before the first layer's gradient."""

    def fail(gradient: torch.Tensor) -> None:
        raise MemoryError

    hook = dict(model.named_parameters())["first.weight"].register_hook(fail)
    with pytest.raises(MemoryError):
        accumulate(model, optimizer, batches[:1])
    hook.remove()


def late_sums(optimizer: OverlappedDistributedOptimizer) -> None:
    """What other ranks add to gradients that are final late."""
    for shard in optimizer.adam.shards:
        for part in shard.ranges:
            if part.needs_extra_reduction:
                shard.grad[part.begin : part.end].mul_(3.0)


def train(case: tuple, offload: Offload | None, fake: FakeDevice) -> dict[str, Any]:
    """Norms, losses and weights of steps of all kinds."""
    zero_stage, dtype, clip_grad, copies = case
    with fake.executing():
        model, other = OddModel(dtype=dtype), OddModel(seed=7, dtype=dtype)
        steps = [[batch.to(dtype) for batch in step[0]] for step in make_steps(NUM_STEPS, 1, 2)]
    model.last.bias.shared_embedding = True
    fake.adopt(list(model.parameters()))
    on_host = case in ON_HOST and offload is not None
    optimizer = build(model, zero_stage, clip_grad, copies, offload, cpu_offloading_weights=on_host)
    bias = model.first.bias
    norms, losses, resumed = [], [], dict[str, Any]()
    for index, step in enumerate(steps):
        optimizer.placement.apply()
        model.is_short = index % 3 == 1
        if index == 4:  # as a resume does, where chunks may be in other places
            optimizer.load_state_dict(resumed)
        if index == 5:
            with optimizer.full_weights():
                model.first.load_state_dict(other.first.state_dict())
            optimizer.reload_model_params()
        if index in (1, 7) and zero_stage is not ZeroStage.PARAMETERS:  # written as in plain torch
            model.first.weight.data.clamp_(-0.1, 0.1)
        if index == 8 and zero_stage is not ZeroStage.PARAMETERS:  # a tensor of before the last step
            optimizer.finish_param_sync()
            bias.data.add_(1.0)
        if index == 9:
            with optimizer.full_weights():
                model.last.weight.data.mul_(0.5)
        if index == 3:
            fail_midway(model, optimizer, step)
        accumulate(model, optimizer, [] if index == 8 else step)  # 8: without backward
        with torch.no_grad():
            if on_host:  # as a copy from pinned memory does
                fake.compute.synchronize()
            late_sums(optimizer)
        if index % 4 == 2:  # a step that is not taken
            continue
        norms.append(optimizer.step().grad_norm)
        if index == 7:
            with torch.no_grad():
                losses.append(model(step[0]))
        if index == 3:
            resumed = optimizer.state_dict()
            with optimizer.full_weights():
                saved = {name: weight.clone() for name, weight in model.state_dict().items()}
    optimizer.placement.apply()
    with optimizer.full_weights():
        weights = {name: weight.clone() for name, weight in model.named_parameters()}
    states = [torch.cat([state for state, _ in states_of(optimizer, name)]) for name in optimizer.adam.dtypes]
    fake.compute.synchronize()
    with fake.executing():
        found = {f"saved {name}": weight.float().numpy() for name, weight in saved.items()}
        found |= {f"state {index}": state.numpy() for index, state in enumerate(states)}
        found |= {name: weight.detach().float().numpy() for name, weight in weights.items()}
        return {"bits": [norms, [loss.item() for loss in losses]], "arrays": found}


def faked(order: Order, host_bytes: int, case: tuple) -> dict[str, Any]:
    fake = FakeDevice(order)
    with on(fake) as kernel:
        streams = FakeOffloadDevice(fake, "streamed states")
        offload = Offload(
            FakeOffloadDevice(fake), RandomPolicy(order), CHUNK, host_bytes,  # type: ignore[arg-type]
            streamed=STREAMED[is_streamed(case, order)], streams=streams,
        )  # fmt: skip
        with mock.patch.object(offload_module, "StreamedShare", RandomShare):
            found = train(case, offload, fake)
    return found | {"faults": kernel.faults, "updates": len(kernel.numels)}


class RandomShare(StreamedShare):
    """Each chunk on the host is streamed or not, by chance, before each step."""

    def moves(self, chunks: Sequence) -> list[Move]:
        wanted = [Move(chunk, True, "a test", random.random() < 0.6) for chunk in chunks]
        return [move for move in wanted if move.is_streamed != move.chunk.is_streamed]


class ToTheDevice:
    """Everything, when it is asked for the second time."""

    is_asked = False

    def moves(self, chunks: Sequence, memory: DeviceMemory) -> list[Move]:
        found = [Move(chunk, False, "a test") for chunk in chunks] if self.is_asked else []
        self.is_asked = True
        return found


def move_after_a_step_not_taken() -> tuple[int, int]:
    """Updates on the host after the move, of chunks that are on the device by now, and all before."""
    fake = FakeDevice(LATE)
    with fake.executing():
        model, (step, *_) = OddModel(), make_steps(1, 1, 1)
    with on(fake) as kernel:
        fake.adopt(list(model.parameters()))
        offload = Offload(FakeOffloadDevice(fake), ToTheDevice(), CHUNK)  # type: ignore[arg-type]
        optimizer = build(model, ZeroStage.NONE, FREE, ALIKE, offload)
        accumulate(model, optimizer, step[0])
        worker = optimizer.adam.host_updates._worker
        worker.run_next()
        worker.jobs[0][0].set_running_or_notify_cancel()  # begun, and not yet at the states
        optimizer.placement.apply()
        before = len(kernel.numels)
        while worker.jobs:
            worker.run_next()
    return len(kernel.numels) - before, before


class Written(OddModel):
    """The first layer's weight gets its gradient from the layer itself."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(PLAIN(batch, self.first.weight) + self.first.bias)
        return (self.last(hidden) * self.gain).square().mean()


def executed_while_the_host_goes_on(zero_stage: ZeroStage) -> list[tuple[int, int, int, int]]:
    """Return four counts of operations for each step, on a device that executes only when the host waits.

    Executed when all backwards and the norm are queued; executed when the norm is known; queued at that
    moment; and operations of the norm that were queued in backward.
    """
    fake, found = FakeDevice(LATE), []
    with fake.executing():
        model, steps = Written(), [step[0] for step in make_steps(3, 1, 2)]
    with on(fake):
        fake.adopt(list(model.parameters()))
        optimizer = build(model, zero_stage, CLIPPED, ALIKE, None, gradient_accumulation_fusion=True)
        for step in steps:
            before, norms = fake.compute.num_done, stream_of(optimizer.device, "norms")
            accumulate(model, optimizer, step)
            num_of_norm = len(norms.tasks)
            optimizer.start_grad_norm()
            num_in_backward = fake.compute.num_done - before
            optimizer.step()
            num_until_norm = fake.compute.num_done - before
            found.append((num_in_backward, num_until_norm, len(fake.compute.tasks), num_of_norm))
    return found


def gathers_that_wait_for_compute() -> int:
    """Tasks of the gathers' stream that are left when all that needs no compute has been executed: the host
    has updated all weights, the forward that reads them is queued, and started the gathers in its midst."""
    fake = FakeDevice(LATE)
    with fake.executing():
        model, (step, *_) = OddModel(), make_steps(1, 1, 1)
    with on(fake):
        fake.adopt(list(model.parameters()))
        offload = Offload(FakeOffloadDevice(fake), StaticPlacementPolicy(1.0), CHUNK)
        optimizer = build(model, ZeroStage.OPTIMIZER, FREE, ALIKE, offload)
        accumulate(model, optimizer, step[0])
        optimizer.step()
        fake.compute.synchronize()
        with torch.no_grad():
            model(step[0][0])
        fake.run_others()
        assert fake.compute.tasks
        return len(fake.comm_of(optimizer.grad_buffer.buckets[0].buffer_group.shard_group).tasks)


def copies_under_way_when_buffers_are_freed() -> list[bool]:
    """Whether the last copy to the host is still in flight, for each buffer of streamed states."""
    fake = FakeDevice(LATE)
    with fake.executing():
        model, (step, *_) = OddModel(), make_steps(1, 1, 1)
    with on(fake):
        fake.adopt(list(model.parameters()))
        offload = Offload(FakeOffloadDevice(fake), StaticPlacementPolicy(1.0), CHUNK, streamed=1.0)
        optimizer = build(model, ZeroStage.NONE, FREE, ALIKE, offload)
        accumulate(model, optimizer, step[0])
        optimizer.step()
        updates = optimizer.adam.streamed_updates
        ends = [buffer.copied_back for buffer in updates._buffers]
        updates.resize_buffers([])
        return [not end.query() for end in ends]


def is_streamed(case: tuple, order: Order) -> bool:
    """Whether some states are streamed; each order has both, and so has each case."""
    return (CASES.index(case) // 2 + ORDERS.index(order)) % 2 == 1


def host_bytes_of(case: tuple, order: Order) -> int:
    """Each order has both amounts, in two cases each."""
    return (UNLIMITED, TIGHT)[(CASES.index(case) + ORDERS.index(order)) % 2]


def run_all(rank: int, world_size: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {"moved": move_after_a_step_not_taken()}
    found["freed"] = copies_under_way_when_buffers_are_freed()
    found["gathers"] = gathers_that_wait_for_compute()
    for zero_stage in (ZeroStage.NONE, ZeroStage.OPTIMIZER):
        found["executed", zero_stage] = executed_while_the_host_goes_on(zero_stage)
    for case in CASES:
        reference = FakeDevice(AT_ONCE)
        with collectives_of(reference):
            found[case] = train(case, None, reference)
        for order in ORDERS:
            found[case, order] = faked(order, host_bytes_of(case, order), case)
    return found


@pytest.fixture(scope="module")
def outcomes() -> dict[Any, Any]:
    return run_distributed(run_all, 1)[0]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_order_of_execution_changes_a_bit(outcomes: dict, case: tuple, order: Order) -> None:
    expected, ours = outcomes[case], outcomes[case, order]
    assert ours["bits"] == expected["bits"] and ours["arrays"].keys() == expected["arrays"].keys()
    for name, values in expected["arrays"].items():
        assert np.isfinite(values).all() and np.array_equal(ours["arrays"][name], values), name
    assert not ours["faults"] and ours["updates"] > (4 if is_streamed(case, order) else 20)


def test_nothing_of_a_step_not_taken_is_under_way_when_chunks_move(outcomes: dict) -> None:
    """The host's kernel would have got addresses of the device."""
    assert outcomes["moved"] == (0, 2)


def test_no_buffer_of_streamed_states_is_freed_while_it_is_read(outcomes: dict) -> None:
    assert outcomes["freed"] == [False] * NUM_STREAMED


def test_gathers_in_the_midst_of_a_forward_do_not_wait_for_it(outcomes: dict) -> None:
    assert outcomes["gathers"] == 0


@pytest.mark.parametrize("zero_stage", [ZeroStage.NONE, ZeroStage.OPTIMIZER])
def test_the_host_waits_for_the_norm_alone(outcomes: dict, zero_stage: ZeroStage) -> None:
    """It queues forward and backward while the update before has not begun, and its own behind the norm."""
    for num_in_backward, num_until_norm, num_queued, num_of_norm in outcomes["executed", zero_stage]:
        assert num_in_backward == 0 and num_until_norm > 0 and num_queued > 0 and num_of_norm > 0
