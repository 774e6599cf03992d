"""What a bucket says of the gradients that it collected."""

import pytest
import torch
import torch.distributed as dist

from patch.config.choices import ZeroStage
from patch.layout.buckets import BucketRange, ParamRange
from patch.optimizer.buckets.bucket import Bucket
from patch.optimizer.buckets.buffer_group import BufferGroup


def staged_bucket(*params: ParamRange) -> Bucket:
    group = dist.group.WORLD
    assert group is not None
    buffer_group = BufferGroup(ZeroStage.GRADIENTS, group, torch.float32, group, None, None)
    return Bucket(0, BucketRange(0, 64, params), torch.zeros(64), None, buffer_group)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("number", [1.0, torch.inf, torch.nan])
def test_only_gradients_are_looked_at_not_what_others_left_behind_them(number: float) -> None:
    """A staging buffer still has another bucket's gradients in this bucket's padding: zeros must be sent."""
    used, unused = ParamRange(0, 0, 10), ParamRange(1, 10, 16)
    bucket = staged_bucket(used, unused)
    bucket.use_staging(torch.full([100], torch.nan))
    bucket.begin_micro_batch(is_last=True)
    bucket.collect(used, torch.full([10], number), is_nested=False)
    bucket.complete()
    assert bucket.is_finite() == (number == 1.0)
    assert bucket.buffer is not None and bucket.buffer[16:].tolist() == [0.0] * 48
