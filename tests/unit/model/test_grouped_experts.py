"""Experts by torch's grouped products, which a CPU has too: against plain torch, and without a wait."""

from typing import Any

import pytest
import torch
from distributed_runner import new_job, run_distributed
from fake_device import LATE, FakeDevice
from small_runs import small_run
from torch.nn.functional import silu
from torch.utils._python_dispatch import TorchDispatchMode
from training_runs import build_seeded_run, build_stages, train_run

from patch.model import initialize_weights
from patch.model.experts.grouped import GroupedExperts
from patch.model.weight_gradient import as_one

BF16 = 2**-7
"""Of norms: three numbers of a chain of products are rounded to 2**-9."""
HIDDEN, WIDTH, NUM_EXPERTS = 16, 24, 4
SHAPE: dict[str, Any] = {
    "num_layers": 2, "num_experts": NUM_EXPERTS, "moe_router_topk": 2, "moe_ffn_hidden_size": 48,
    "precision": "bf16",
}  # fmt: skip


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return silu(gate) * up


def one_by_one(
    tokens: torch.Tensor, weights: torch.Tensor, sizes: list[int], first: torch.Tensor, second: torch.Tensor
) -> torch.Tensor:
    parts = zip(tokens.split(sizes), weights.split(sizes), first, second, strict=True)
    return torch.cat([(swiglu(x @ a.t()) * w[:, None]) @ b.t() for x, w, a, b in parts])


@pytest.mark.parametrize("sizes", [[3, 0, 5, 1], [0, 9, 0, 0]], ids=["one idle", "one has all"])
# Matrices beside each other, apart, at odd places, in reverse order.
@pytest.mark.parametrize(("gap", "order"), [(0, 1), (8, 1), (1, 1), (0, -1)])
@pytest.mark.parametrize("are_known", [False, True])
def test_experts_are_those_of_plain_torch(sizes: list[int], gap: int, order: int, are_known: bool) -> None:
    torch.manual_seed(0)
    tokens, weights = torch.randn(sum(sizes), HIDDEN).bfloat16(), torch.rand(sum(sizes))
    halves = [torch.randn(NUM_EXPERTS, *shape).bfloat16() for shape in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))]
    exact = [part.double().requires_grad_() for part in (tokens, weights, *halves)]
    expected = one_by_one(exact[0], exact[1], sizes, exact[2], exact[3])
    gradient = torch.randn(expected.shape).bfloat16()
    expected.backward(gradient.double())

    own = [tokens.requires_grad_(), weights.requires_grad_()]
    for half in halves:
        step = half[0].numel() + gap
        memory = torch.zeros(NUM_EXPERTS * step, dtype=half.dtype)
        begins = [index * step for index in range(NUM_EXPERTS)][::order]
        places = [memory[begin : begin + half[0].numel()].view(half[0].shape) for begin in begins]
        own += [place.copy_(of).detach().requires_grad_() for place, of in zip(places, half, strict=True)]
        assert (as_one(own[-NUM_EXPERTS:]) is None) == (gap == 1 or order == -1)
    ends = torch.tensor(sizes).cumsum(0, dtype=torch.int32)
    output = GroupedExperts.apply(own[0], own[1], ends, sizes if are_known else None, swiglu, *own[2:])
    output.backward(gradient)
    grads = [part.grad for part in own]
    first, second = grads[2 : 2 + NUM_EXPERTS], grads[2 + NUM_EXPERTS :]
    found = [output, *grads[:2], torch.stack(first), torch.stack(second)]
    for ours, theirs in zip(found, [expected, *(part.grad for part in exact)], strict=True):
        assert (ours - theirs).norm() <= BF16 * theirs.norm()
    idle = [not size for size in sizes]
    assert not torch.stack(first)[idle].any() and not torch.stack(second)[idle].any()


def losses(rank: int, world_size: int, changes: dict[str, Any]) -> list[list[float]]:
    """Losses and norms of steps with single products, and with those of Hopper."""
    found = []
    for is_grouped in (False, True):
        new_job()
        run = build_seeded_run(small_run(**SHAPE, **changes))
        for layer in run.stages[0].decoder.layers:
            layer.mlp.experts.is_grouped = is_grouped
            local = [*layer.mlp.experts.local_experts][::-1]
            for name in ("linear_fc1", "linear_fc2"):
                assert as_one([getattr(each, name).weight for each in local]) is not None, "a copy"
        with WithoutWait():
            found.append([value for step in train_run(run) for value in (step.loss, step.grad_norm)])
    return found


class WithoutWait(TorchDispatchMode):
    """Fails at an operation whose number of results the host would wait for."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        assert operation._schema.name not in ("aten::masked_select", "aten::nonzero"), operation
        return operation(*args, **(kwargs or {}))


FUSED = {"gradient_accumulation_fusion": True}
RUNS = [
    {}, pytest.param(FUSED, marks=pytest.mark.long),
    pytest.param(FUSED | {"dp": 2, "expert_model_parallel_size": 2}, marks=pytest.mark.long),
    pytest.param(FUSED | {"dp": 2, "data_parallel_sharding": "gradients"}, marks=pytest.mark.long),
]  # fmt: skip


@pytest.mark.parametrize("changes", RUNS, ids=str)
def test_a_run_is_that_of_single_products(changes: dict[str, Any]) -> None:
    single, grouped = run_distributed(losses, changes.get("dp", 1), changes)[0]
    is_rounded = "gradient_accumulation_fusion" in changes and "expert_model_parallel_size" not in changes
    assert (single != grouped) == is_rounded, "the host knows the rows of each expert only with EP"
    assert grouped == pytest.approx(single, rel=BF16)


def on_a_late_device(rank: int, world_size: int) -> list[int]:
    """What a device has executed when the host leaves forward and backward, with grouped products or not."""
    config = small_run(**SHAPE)
    _, (stage,) = build_stages(config)
    initialize_weights([stage], config.model, seed=1)
    found, layer = [], stage.decoder.layers[0].mlp
    for layer.experts.is_grouped in (True, False):
        states, device = torch.randn(8, 2, 64).bfloat16().requires_grad_(), FakeDevice(LATE)
        layer.zero_grad()
        device.adopt([states, *layer.parameters(), *layer.buffers()])
        with device:
            layer(states)[0].sum().backward()
        assert device.compute.tasks, "it is late"
        found.append(device.compute.num_done)
    return found


def test_the_host_waits_for_nothing() -> None:
    ((grouped, single),) = run_distributed(on_a_late_device, 1)
    assert grouped == 0 and single > 0
