"""The contenders of `overlap`: ours at each sharding level, upstream, compute alone, communication alone."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.config.choices import ZeroStage
from patch.config.schema import RunConfig
from patch.data import Batch, BatchReader
from patch.distributed.async_collectives import WaitClock, start_all_gather, start_reduce_scatter
from patch.model import build_llama_model, initialize_weights
from patch.optimizer import OverlappedDistributedOptimizer
from patch.plan.sharding import with_sharding
from patch.training.setup import Run, build_run_optimizer
from patch.training.step import train_step
from toolkits.benchmarks._overlap_figures import ALL_TO_ALL, COMMUNICATION, COMPUTE
from toolkits.benchmarks._upstream import Overlap, UpstreamTrainer
from toolkits.benchmarks._waiting_layers import let_layers_wait

OURS = {f"ours: {stage.name.lower()}": stage for stage in ZeroStage}
UPSTREAM = {
    "upstream: no overlap": Overlap(),
    "upstream: gradients": Overlap(gradients=True),
    "upstream: gradients + weights": Overlap(gradients=True, weights=True),
    ALL_TO_ALL: Overlap(gradients=True, weights=True, all_to_all=True),
}


class Contender(Protocol):
    """The interface of a contender."""

    @property
    def num_buckets(self) -> int:
        """The number of messages for all gradients."""

    def step(self) -> float:
        """One optimizer step; returns the loss, or 0 without a model."""

    def settle(self) -> None:
        """Wait for communication that the last step has started."""


class SameBatches:
    """A reader that returns the same micro-batches in every step; all tokens are learned."""

    def __init__(self, config: RunConfig, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        shape = (config.training.micro_batch_size, config.sample_length)
        self.batches = [
            Batch(
                torch.randint(config.model.vocab_size, shape, generator=generator),
                torch.randint(config.model.vocab_size, shape, generator=generator),
                torch.ones(shape),
            )
            for _ in range(config.num_micro_batches)
        ]

    def step(self, iteration: int) -> list[Batch]:
        """The micro-batches of this rank."""
        return self.batches


class OurTrainer:
    """The step of patch.training, as in every run.

    Args:
        config: the run.
        groups: the process groups of the job.
        device: the device of this rank.
        reader: gives the micro-batches.
        wait_s: seconds of a micro-batch in layers that wait; 0: layers compute.
    """

    def __init__(
        self,
        config: RunConfig,
        groups: ProcessGroupCollection,
        device: torch.device,
        reader: BatchReader | SameBatches,
        wait_s: float = 0.0,
    ) -> None:
        stages = build_llama_model(config.model, groups, device, config.execution)
        initialize_weights(stages, config.model, config.training.seed)
        if wait_s:
            let_layers_wait(stages[0], wait_s, dist.get_rank())
        optimizer = build_run_optimizer(stages, config, groups)
        self.run = Run(
            config=config,
            device=device,
            groups=groups,
            tokenizer=None,
            train_reader=reader,  # type: ignore[arg-type]
            valid_readers={},
            stages=stages,
            optimizer=optimizer,
            start_iteration=0,
        )
        self._iteration = 0

    @property
    def num_buckets(self) -> int:
        """The number of messages for all gradients."""
        return len(self.run.optimizer.grad_buffer.buckets)

    def step(self) -> float:
        """One optimizer step, including the count of the next step's tokens."""
        loss = train_step(self.run, self._iteration).loss
        self._iteration += 1
        return loss

    def settle(self) -> None:
        """Wait for the updated weights."""
        self.run.optimizer.finish_param_sync()


class ComputeAlone(OurTrainer):
    """A job of one rank, without communication.

    It updates all parameters, while a rank of the other contenders updates only its shard; `take_surplus` is
    the time of the part that belongs to other ranks.
    """

    def __init__(
        self,
        config: RunConfig,
        groups: ProcessGroupCollection,
        device: torch.device,
        reader: SameBatches,
        wait_s: float = 0.0,
    ) -> None:
        alone = copy.copy(groups)
        alone.dp = alone.dp_cp = dist.new_subgroups(1)[0]
        super().__init__(config, alone, device, reader, wait_s)
        self._num_shards = groups.dp_cp.size()
        self._update_s = 0.0
        update = self.run.optimizer._update

        def timed_update(grad_norm: float, lr: float) -> None:
            begin = now(device)
            update(grad_norm, lr)
            self._update_s += now(device) - begin

        self.run.optimizer._update = timed_update  # type: ignore[method-assign, assignment]

    def take_surplus(self) -> float:
        """Seconds of updates that belong to other ranks' shards, since the last call."""
        update_s, self._update_s = self._update_s, 0.0
        return update_s * (1 - 1 / self._num_shards)


class CommunicationAlone:
    """The bytes of one sharded step, bucket by bucket: gradients reduce-scattered, weights gathered."""

    def __init__(self, like: OverlappedDistributedOptimizer) -> None:
        self._group = like.groups.dp_cp
        self._rank, self._num_ranks = self._group.rank(), self._group.size()
        self._clock = WaitClock(like.device)
        numels = [bucket.range.numel for bucket in like.grad_buffer.buckets]
        total, device = sum(numels), like.device
        self._gradients = torch.zeros(total, dtype=torch.float32, device=device).split(numels)
        self._weights = torch.zeros(total, dtype=like.param_buffer.flats[0].dtype, device=device).split(
            numels
        )

    @property
    def num_buckets(self) -> int:
        """The number of messages for all gradients."""
        return len(self._gradients)

    @property
    def num_bytes(self) -> int:
        """Bytes that a rank sends in a step."""
        whole = sum(part.numel() * part.element_size() for part in (*self._gradients, *self._weights))
        return whole * (self._num_ranks - 1) // self._num_ranks

    def step(self) -> float:
        """All reductions, then all gathers."""
        reduced = [start_reduce_scatter(part, self._own(part), self._group) for part in self._gradients]
        for pending in reduced:
            pending.wait(self._clock)
        gathered = [start_all_gather(part, self._own(part), self._group) for part in self._weights]
        for pending in gathered:
            pending.wait(self._clock)
        return 0.0

    def settle(self) -> None:
        """Nothing to do: every step waits for its own communication."""

    def _own(self, part: torch.Tensor) -> torch.Tensor:
        return part.chunk(self._num_ranks)[self._rank]


def build_contenders(
    config: RunConfig,
    groups: ProcessGroupCollection,
    device: torch.device,
    wait_s: float = 0.0,
    without: Sequence[str] = (),
) -> dict[str, Contender]:
    """The contenders by name, on this rank; each has its own model with the same first weights.

    Args:
        config: the run that all contenders train.
        groups: the process groups of the job.
        device: the device of this rank.
        wait_s: seconds of a micro-batch in layers that wait; 0: layers compute.
        without: the names of those that are left out.
    """
    reader = SameBatches(config, groups.dp_cp.rank())
    contenders: dict[str, Contender] = {COMPUTE: ComputeAlone(config, groups, device, reader, wait_s)}
    for name, stage in OURS.items():
        if name in without:
            continue
        contenders[name] = OurTrainer(with_sharding(config, stage), groups, device, reader, wait_s)
    sharded = contenders["ours: optimizer"]
    assert isinstance(sharded, OurTrainer)
    contenders[COMMUNICATION] = CommunicationAlone(sharded.run.optimizer)
    for name, overlap in UPSTREAM.items():
        if name in without:
            continue
        contenders[name] = UpstreamTrainer(config, groups, device, reader.batches, overlap, wait_s)
    return contenders


def time_round(contender: Contender, steps: int, device: torch.device) -> tuple[float, float]:
    """Time one round: an untimed step, then `steps` timed ones.

    After the untimed step the timing is steady: each timed forward begins while the weights of the previous
    step are still being gathered, and the gather of the last step is not timed.

    Args:
        contender: the contender to time.
        steps: number of timed steps.
        device: the device of this rank.
    Returns:
        seconds per step, and the last loss.
    """
    contender.step()
    if isinstance(contender, ComputeAlone):
        contender.take_surplus()
    dist.barrier()
    begin = now(device)
    for _ in range(steps):
        loss = contender.step()
    seconds = now(device) - begin
    contender.settle()
    if isinstance(contender, ComputeAlone):
        seconds -= contender.take_surplus()
    return seconds / steps, loss


def now(device: torch.device) -> float:
    """The time in seconds, after waiting for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
