"""The product that adds to the main gradients: its exactness, by a float64 oracle."""

import pytest
import torch

from patch.model.weight_gradient import add_product, has_epilogue

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
NUM_BATCHES = 8


def batches(dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(5)
    return [(torch.randn(33, 24).to(dtype), torch.randn(33, 40).to(dtype)) for _ in range(NUM_BATCHES)]


def error(total: torch.Tensor, dtype: torch.dtype) -> float:
    exact = sum((a.double().t() @ b.double() for a, b in batches(dtype)), torch.zeros(()))
    return ((total.double() - exact).norm() / exact.norm()).item()


def added_up(dtype: torch.dtype, total_dtype: torch.dtype) -> torch.Tensor:
    total = torch.full((24, 40), torch.nan, dtype=total_dtype)
    for index, (a, b) in enumerate(batches(dtype)):
        add_product(total, a.t(), b, overwrite=index == 0)
    return total


@pytest.mark.parametrize(
    ("dtype", "total", "bound"),
    [(BF16, FP32, 1e-6), (FP16, FP32, 1e-6), (FP32, FP32, 1e-6), (BF16, BF16, 6e-3), (FP32, BF16, 6e-3)],
)
def test_products_are_added_up_over_what_was_there_without_a_rounding(dtype, total, bound) -> None:
    """The first one overwrites even NaN. The bounds: two to three times what was measured."""
    assert error(added_up(dtype, total), dtype) < bound
    if dtype != FP32 and total == FP32:
        rounded = torch.stack([(a.t() @ b).float() for a, b in batches(dtype)]).sum(0)
        assert error(added_up(dtype, total), dtype) < 0.01 * error(rounded, dtype)


def test_a_device_without_the_kernel_is_known() -> None:
    assert not has_epilogue(torch.device("cpu"), BF16, FP32)
