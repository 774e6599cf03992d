"""How many reductions travel at once on a CPU, and that it changes nothing but when they are waited for."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from optimizer_runs import ZERO_STAGES, OddModel, build_optimizer, make_steps, take_step, weights_of

from patch.config.choices import ZeroStage
from patch.distributed.async_collectives import Pending, WaitClock
from patch.optimizer import bucket, grad_buffer

_EACH_PARAMETER = {"reduce_bucket_size": 1}
"""Five buckets, one for each parameter of the model."""


class _Network:
    """Counts the reductions that nobody has waited for yet; each arrives when it is waited for."""

    def __init__(self) -> None:
        self.num_travelling: list[int] = []
        """How many travel, whenever one more has started."""
        self._under_way = 0

    def _start(self, buffer: torch.Tensor, out: torch.Tensor) -> Pending:
        network = self

        class Reduction(Pending):
            def wait(self, clock: WaitClock | None = None) -> None:
                out.copy_(buffer)
                network._under_way -= 1

        self._under_way += 1
        self.num_travelling.append(self._under_way)
        return Reduction([])

    def start_all_reduce(self, buffer: torch.Tensor, group: dist.ProcessGroup) -> Pending:
        return self._start(buffer.clone(), buffer)

    def start_reduce_scatter(
        self, buffer: torch.Tensor, out: torch.Tensor, group: dist.ProcessGroup, travels_as: None
    ) -> Pending:
        return self._start(buffer.clone(), out)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("zero_stage", ZERO_STAGES)
def test_a_cpu_waits_for_older_reductions_and_no_bit_depends_on_when(
    zero_stage: ZeroStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for limit in (0, 1, 2, 10**6):
        monkeypatch.setattr(grad_buffer, "MAX_TRAVELLING", limit)
        network, model = _Network(), OddModel()
        monkeypatch.setattr(bucket, "start_all_reduce", network.start_all_reduce)
        monkeypatch.setattr(bucket, "start_reduce_scatter", network.start_reduce_scatter)
        optimizer = build_optimizer(model, zero_stage, **_EACH_PARAMETER)
        norms = [take_step(model, optimizer, step[0]) for step in make_steps(3, 1, 1)]
        optimizer.finish_param_sync()
        results.append((norms, weights_of(model)))
        monkeypatch.undo()
        num_buckets = len(optimizer.grad_buffer.buckets)
        assert len(network.num_travelling) == 3 * num_buckets
        assert max(network.num_travelling) == min(num_buckets, limit + 1)
    first_norms, first_weights = results[0]
    for norms, weights in results[1:]:
        assert norms == first_norms
        for name, weight in weights.items():
            assert np.array_equal(weight, first_weights[name]), name
