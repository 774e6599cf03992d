"""What a bucket says of the gradients that it collected."""

import pytest
import torch
import torch.distributed as dist

from patch.config.choices import ZeroStage
from patch.layout.buckets import BucketRange, ParamRange
from patch.optimizer.bucket import Bucket, Staging
from patch.optimizer.domain import Domain


def staged_bucket(*params: ParamRange) -> Bucket:
    group = dist.group.WORLD
    assert group is not None
    domain = Domain(ZeroStage.GRADIENTS, group, torch.float32, group, None, None)
    return Bucket(0, BucketRange(0, 64, params), torch.zeros(64), None, domain)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("number", [1.0, torch.inf, torch.nan])
def test_only_gradients_are_looked_at_not_what_others_left_behind_them(number: float) -> None:
    """A staging buffer still has the gradients of another bucket where this one has padding: zeros travel."""
    used, unused = ParamRange(0, 0, 10), ParamRange(1, 10, 16)
    bucket = staged_bucket(used, unused)
    bucket.use_staging(torch.full([100], torch.nan))
    bucket.begin_micro_batch(is_last=True)
    bucket.collect(used, torch.full([10], number), is_nested=False)
    bucket.complete()
    assert bucket.is_finite() == (number == 1.0)
    assert bucket.buffer is not None and bucket.buffer[16:].tolist() == [0.0] * 48


@pytest.mark.usefixtures("one_process")
def test_gradients_go_to_the_buffer_of_now_and_of_several_keep_their_own() -> None:
    """Also where a bucket comes to a buffer for the second time, or moves in the midst of a micro-batch."""
    staging = Staging(torch.zeros(0), 64, 2)
    first, second = ParamRange(0, 0, 6), ParamRange(1, 6, 10)
    bucket = staged_bucket(first, second)
    for round_, spare in enumerate([False, True, False, True, True]):
        buffer = staging.borrow_spare() if spare else staging.slot(round_)
        bucket.use_staging(buffer)
        bucket.begin_micro_batch(is_last=True)
        bucket.collect(first, torch.full([2, 3], float(round_)), is_nested=False)
        if spare:
            staging.give_back(bucket.move_to(staging.slot(round_)))
        bucket.collect(first, torch.ones(2, 3), is_nested=False)
        bucket.collect(second, torch.full([4], 7.0), is_nested=False)
        assert staging.slot(round_)[:10].tolist() == [round_ + 1.0] * 6 + [7.0] * 4


def test_a_spare_that_an_error_left_behind_is_lent_again() -> None:
    staging = Staging(torch.zeros(0), 4, 1)
    spare = staging.borrow_spare()
    staging.reset()
    assert staging.borrow_spare() is spare
    assert staging.borrow_spare() is not spare
