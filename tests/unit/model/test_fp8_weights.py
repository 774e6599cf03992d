"""8-bit weights: made once while weights do not change, and the same as those made for each product."""

import pytest
import torch

from patch.config.execution import Fp8
from patch.model.fp8_linear import Fp8Product
from patch.model.fp8_matrix import factors
from patch.model.fp8_weights import StepWeights

RECIPES = ["tensorwise", "rowwise"]


def matrices(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Input, weight and gradient of the output; rows of different size."""
    torch.manual_seed(seed)
    sizes = torch.exp2(4 * torch.randn(48, 1))
    return torch.randn(6, 3, 32).bfloat16(), (torch.randn(48, 32) * sizes).bfloat16(), torch.randn(6, 3, 48)


def results(product: Fp8Product, weight: torch.Tensor, seed: int) -> list[torch.Tensor]:
    """Output and gradients of a micro-batch."""
    x, _, g = matrices(seed)
    weight.grad = None
    output = product(x.requires_grad_(), weight)
    output.backward(g.bfloat16())
    return [output.detach(), x.grad, weight.grad]


@pytest.mark.parametrize("keeps_values", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_of_a_step_are_those_of_new_factors(recipe: str, keeps_values: bool) -> None:
    step = StepWeights(rowwise=recipe == "rowwise", keeps_values=keeps_values)
    fp8, weight = Fp8(recipe=recipe), matrices(0)[1].requires_grad_()
    product = Fp8Product(fp8, keeps_input=False, weight=step.new())
    for seed in range(2):  # steps; weights change between them, by an alias that no version counts
        with step.unchanged():
            kept = [results(product, weight, micro_batch) for micro_batch in range(3)]
        anew = [results(product, weight, micro_batch) for micro_batch in range(3)]
        for ours, theirs in zip(kept, anew, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        weight.data.copy_(matrices(seed + 1)[1] * 16)


@pytest.mark.parametrize("rowwise", [False, True])
def test_what_is_kept_and_how_long(rowwise: bool) -> None:
    _, w, _ = matrices(0)
    step = StepWeights(rowwise=rowwise, keeps_values=True)
    weight = step.new()
    assert weight.rows(w).values is not weight.rows(w).values
    with step.unchanged():
        rows, columns = weight.rows(w), weight.columns(w)
        assert weight.rows(w) is rows and weight.columns(w) is columns
        assert rows.values.nbytes == columns.values.nbytes == w.numel()  # what the plan counts
        expected = factors(w, torch.float8_e4m3fn, rowwise=rowwise)
        for ours, theirs in zip((rows, columns), expected, strict=True):
            assert torch.equal(ours.values.view(torch.uint8), theirs.values.view(torch.uint8))
            assert torch.equal(ours.scale_inv, theirs.scale_inv)
    assert weight.rows(w) is not rows
    with pytest.raises(KeyError), step.unchanged():
        weight.rows(w)
        raise KeyError
    assert not torch.equal(weight.rows(w * 3).values.float(), rows.values.float())
    with (scales_only := StepWeights(rowwise=rowwise, keeps_values=False)).unchanged():
        weight = scales_only.new()
        assert weight.rows(w).values is not weight.rows(w).values
        assert weight.rows(w).scale_inv is weight.rows(w).scale_inv
