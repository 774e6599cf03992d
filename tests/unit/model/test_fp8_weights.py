"""8-bit weights: made once while weights do not change. Whole steps with them: test_fp8_linear.py."""

import pytest
import torch

from patch.model.fp8_matrix import factors
from patch.model.fp8_weights import StepWeights


@pytest.mark.parametrize("rowwise", [False, True])
def test_what_is_kept_and_how_long(rowwise: bool) -> None:
    torch.manual_seed(0)
    w = (torch.randn(48, 32) * torch.exp2(4 * torch.randn(48, 1))).bfloat16()
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
