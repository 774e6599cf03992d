"""Experts: a layer against transformers' own, losses and capacity against their formulas in plain torch."""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from distributed_runner import run_distributed
from small_runs import small_run
from torch.nn.functional import one_hot, silu
from training_runs import build_stages
from transformers import AutoConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from patch.model import initialize_weights
from patch.model.experts import layer as experts
from patch.model.experts.layer import EXTRA_STATS

NUM_EXPERTS, CHOSEN, WIDTH, SHARED = 4, 2, 48, 80
SHAPE: dict[str, Any] = {
    "num_layers": 1, "num_experts": NUM_EXPERTS, "moe_router_topk": CHOSEN, "moe_ffn_hidden_size": WIDTH,
}  # fmt: skip
OF_QWEN = {
    "moe_router_pre_softmax": True, "moe_shared_expert_intermediate_size": SHARED,
    "moe_shared_expert_gate": True,
}  # fmt: skip
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "mixtral": (MixtralSparseMoeBlock, {}), "qwen2_moe": (Qwen2MoeSparseMoeBlock, OF_QWEN),
}  # fmt: skip
LENGTH, ROWS, HIDDEN = 16, 2, 64
BOUND = 1e-5
"""Relative to the largest value: sums in another order; weights before the second product, not after it."""


def moe_layer(**changes: Any) -> Any:
    """Upstream's layer in our model of one layer, with random weights."""
    config = small_run(**SHAPE | changes)
    _, (stage,) = build_stages(config)
    initialize_weights([stage], config.model, seed=1)
    return stage.decoder.layers[0].mlp


def hidden_states() -> torch.Tensor:
    """[S, B, H], positive, so that a router's rows may decide for all tokens alike."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(LENGTH, ROWS, HIDDEN, generator=generator).requires_grad_()


def choose_the_same(layer: Any) -> None:
    """Let all tokens choose the first and the third expert."""
    layer.router.weight.data[:] = torch.tensor([0.02, -0.01, 0.03, -0.02])[:, None]


def under_their_names(ours: Any, part: Callable[[Any], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Our layer's weights, or another part of each parameter, as the block of transformers has them."""
    local, shared = ours.experts.local_experts, ours.shared_experts
    found = {
        "gate.weight": part(ours.router.weight),
        "experts.gate_up_proj": torch.stack([part(expert.linear_fc1.weight) for expert in local]),
        "experts.down_proj": torch.stack([part(expert.linear_fc2.weight) for expert in local]),
    }
    if shared is not None:
        gate, up = part(shared.linear_fc1.weight).chunk(2)
        each = {"gate_proj": gate, "up_proj": up, "down_proj": part(shared.linear_fc2.weight)}
        found |= {f"shared_expert.{name}.weight": values for name, values in each.items()}
        found["shared_expert_gate.weight"] = part(shared.gate_weight)
    return found


def their_block(ours: Any, family: str) -> Any:
    config = AutoConfig.for_model(
        family, hidden_size=HIDDEN, intermediate_size=WIDTH, moe_intermediate_size=WIDTH,
        shared_expert_intermediate_size=SHARED, num_experts=NUM_EXPERTS, num_local_experts=NUM_EXPERTS,
        num_experts_per_tok=CHOSEN,
    )  # fmt: skip
    config._experts_implementation = "eager"
    block = FAMILIES[family][0](config)
    block.load_state_dict(under_their_names(ours, lambda weight: weight.data))
    return block


def beside_transformers(rank: int, world_size: int, family: str) -> dict[str, list[dict[str, np.ndarray]]]:
    """Result and gradients of both, with random choices, and where some experts get no token."""
    found, ours = {}, moe_layer(**FAMILIES[family][1])
    for case in ("random", "all the same"):
        if case != "random":
            choose_the_same(ours)
        block, pair = their_block(ours, family), []
        ours.zero_grad()
        for layer in (ours, block):
            states = hidden_states()
            output = layer(states)[0] if layer is ours else layer(states)
            output.square().sum().backward()
            pair.append({"output": output.detach(), "input": states.grad})
        pair[0] |= under_their_names(ours, lambda weight: weight.grad)
        pair[1] |= {name: weight.grad for name, weight in block.named_parameters()}
        found[case] = [{name: value.numpy() for name, value in each.items()} for each in pair]
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_is_that_of_transformers(family: str) -> None:
    (found,) = run_distributed(beside_transformers, 1, family)
    for case, (ours, theirs) in found.items():
        assert ours.keys() == theirs.keys()
        for name, expected in theirs.items():
            bound = BOUND * np.abs(expected).max()
            np.testing.assert_allclose(ours[name], expected, rtol=0, atol=bound, err_msg=f"{case}: {name}")
    idle = found["all the same"][0]["experts.down_proj"][1]
    assert not idle.any(), "an expert without tokens has a gradient of zeros"


AUX, Z = 0.3, 0.2
MICRO_BATCHES = 2


GROUPS = {"moe_router_num_groups": 2, "moe_router_group_topk": 1}
ROUTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "groups": {**GROUPS, "moe_router_pre_softmax": True},
    "sigmoid": {
        **GROUPS, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    },
}  # fmt: skip


def formula(kind: str, logits: torch.Tensor, router: str) -> torch.Tensor:
    """The loss of one micro-batch's logits [S, B, experts] in plain torch; of two groups one is chosen.

    With sigmoids, scores are shares of a token's sum, and choices ignore groups and biases
    (arXiv:2412.19437, equations 17 to 20).
    """
    if kind == "z":
        return Z * logits.logsumexp(-1).square().mean()
    probabilities = logits.softmax(-1)
    if router == "sigmoid":
        probabilities = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    if router == "groups":
        first, second = (group.amax(-1, keepdim=True) for group in logits.chunk(2, -1))
        is_first = torch.arange(NUM_EXPERTS) < NUM_EXPERTS // 2
        logits = logits.where(is_first == (first > second), -math.inf)
    chosen = one_hot(logits.topk(CHOSEN).indices, NUM_EXPERTS).sum(-2).double()
    axes = (0, 1) if kind == "aux_loss" else (0,)
    loads, means = chosen.mean(axes) / CHOSEN, probabilities.mean(axes)
    return AUX * NUM_EXPERTS * (loads * means).sum(-1).mean()


def gradients_of_losses(rank: int, world_size: int, kind: str, name: str) -> list[np.ndarray]:
    """Of a router's weight, by our layer and by the formula; what the layer counted, and should have."""
    changes: dict[str, Any] = {"micro_batch_size": ROWS, "global_batch_size": ROWS * MICRO_BATCHES}
    loads = {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": AUX}
    changes |= {"moe_z_loss_coeff": Z} if kind == "z" else loads
    router = moe_layer(**changes, **ROUTERS[name]).router
    if router.expert_bias is not None:
        router.expert_bias[:] = torch.tensor([1.0, -1.0, 0.0, 2.0])
    weight = router.weight.detach().double().requires_grad_()
    expected = torch.zeros(())
    for number in range(MICRO_BATCHES):
        states = hidden_states().detach().roll(number, 0) * (1 + number)
        weights, _ = router(states)
        (weights * 0).sum().backward()  # the losses alone
        logits = states.double() @ weight.t()
        expected = expected + formula(kind, logits, name) / MICRO_BATCHES
    expected.backward()
    counted = router.counts[EXTRA_STATS.index("z_loss" if kind == "z" else "aux_loss") - 3]
    factor = Z if kind == "z" else AUX
    pairs = (router.weight.grad, weight.grad, counted * factor, expected.detach())
    return [value.numpy() for value in pairs]


KINDS = [("z", "plain"), *itertools.product(("aux_loss", "seq_aux_loss"), ROUTERS)]


@pytest.mark.parametrize(("kind", "router"), KINDS)
def test_a_loss_of_the_router_is_the_mean_of_its_formula_over_a_step(kind: str, router: str) -> None:
    (found,) = run_distributed(gradients_of_losses, 1, kind, router)
    gradient, expected, counted, loss = found
    assert np.abs(expected).max() > 1e-4
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-7)
    assert counted == pytest.approx(loss, rel=1e-6)


def with_capacity(rank: int, world_size: int) -> list[Any]:
    """Weights, and the full ones of all tokens, with room for 8 of 32 tokens at each expert; the counts."""
    layer = moe_layer(moe_expert_capacity_factor=0.5)
    choose_the_same(layer)
    router = layer.router
    weights, choices = router(hidden_states())
    full = (hidden_states() @ router.weight.t()).flatten(0, 1)[:, [0, 2]].softmax(-1)
    return [tensor.detach().numpy() for tensor in (weights, choices, full, router.counts)]


def test_an_expert_takes_the_likeliest_tokens_up_to_its_capacity() -> None:
    ((weights, choices, full, counts),) = run_distributed(with_capacity, 1)
    for expert, of_all in zip((0, 2), full.T, strict=True):
        likeliest = np.sort(np.argsort(-of_all)[:8])
        np.testing.assert_array_equal(np.flatnonzero(choices[:, expert]), likeliest)
        np.testing.assert_allclose(weights[likeliest, expert], of_all[likeliest], rtol=1e-6)
    assert not choices[:, [1, 3]].any()
    assert counts.tolist() == [8, 0, 8, 0, 2 * LENGTH * ROWS - 16, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at_once", [False, True], ids=["as on a CPU", "as on a GPU"])
def test_experts_have_the_bits_of_single_operations(dtype, at_once, monkeypatch) -> None:
    parts_of = experts._parts
    monkeypatch.setattr(experts, "_parts", lambda sizes, is_cuda: parts_of(sizes, at_once))
    torch.manual_seed(0)
    sizes = [3, 0, 5, 1]
    tokens = torch.randn(sum(sizes), 16, dtype=dtype, requires_grad=True)
    weights = torch.rand(sum(sizes), requires_grad=True)
    first = [torch.randn(24, 16, dtype=dtype, requires_grad=True) for _ in sizes]
    second = [torch.randn(16, 12, dtype=dtype, requires_grad=True) for _ in sizes]
    inputs = (tokens, weights, *first, *second)

    def activate(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return silu(gate) * up

    def one_by_one() -> torch.Tensor:
        parts = zip(tokens.split(sizes), weights.split(sizes), first, second, strict=True)
        return torch.cat([(activate(x @ a.t()) * w[:, None]).to(dtype) @ b.t() for x, w, a, b in parts])

    found, gradient = [], torch.randn(sum(sizes), 16, dtype=dtype)
    together = partial(experts._Experts.apply, tokens, weights, sizes, activate, *first, *second)
    for compute in (together, one_by_one):
        output = compute()
        output.backward(gradient)
        found.append([output.detach(), *(tensor.grad for tensor in inputs)])
        for tensor in inputs:
            tensor.grad = None
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
