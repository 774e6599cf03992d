"""The context-parallel part of `parallel`: two ranks at the ends of a cable of limited speed."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.config.schema import ParallelConfig, RunConfig
from patch.data.samples import cut_batch
from patch.device import DeviceContext, MachineFacts
from patch.distributed.context_group import ContextGroup, Zigzag
from patch.distributed.groups import initialize
from patch.model import LearnedTokens, build_llama_model, initialize_weights
from toolkits.benchmarks._contenders import Contender, SameBatches, llama, run_config
from toolkits.benchmarks._link import Link, limit_speed
from toolkits.benchmarks._measure import COMMUNICATION, COMPUTE, take_turns, time_on_ranks
from toolkits.benchmarks._report import NotRunError
from toolkits.benchmarks._runner import CPU, run_ranks

NUM_RANKS = 2
WHOLE, RING, WAITING_RING, ALL_TO_ALL = "CP=1", "ring", "ring, no overlap", "all-to-all"

_TOKENS = 8192
"""So many that attention is most of the compute, as in a large model with a long context."""


def run(shares: Sequence[float], rounds: int, timeout_s: float) -> list[dict[str, Any]]:
    """`measure` on two cores.

    Raises:
        NotRunError: this machine has too few, or no network namespaces.
    """
    if (cores := MachineFacts.probe().cpu_cores) < NUM_RANKS:
        raise NotRunError(f"needs {NUM_RANKS} cores, found {cores}")
    with Link() as link:
        return run_ranks(measure, NUM_RANKS, timeout_s, link=link, on_cpu=True, shares=shares, rounds=rounds)


def context_run(way: str | None) -> RunConfig:
    """One sequence; `way` is --cp-comm-type, None: without context parallelism."""
    model = llama(
        _TOKENS, num_layers=2, hidden_size=64, ffn_hidden_size=176, num_attention_heads=2, num_query_groups=1,
        kv_channels=32, vocab_size=512,
    )  # fmt: skip
    parallel = ParallelConfig(
        nproc_per_node=NUM_RANKS, context_parallel_size=NUM_RANKS if way else 1,
        cp_comm_type=way,  # type: ignore[arg-type]
    )  # fmt: skip
    return run_config(model, parallel, global_batch_size=1 if way else NUM_RANKS)


class _Arrived:
    """A message that is there."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> torch.Tensor:
        return self._tensor


class WaitingGroup(ContextGroup):
    """Waits for each message as soon as it is on its way; notes how long messages are."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.numels: list[int] = []

    def start_shift(self, tensor: torch.Tensor, *, is_reverse: bool = False) -> Any:
        """See ContextGroup."""
        self.numels.append(tensor.numel())
        return _Arrived(super().start_shift(tensor, is_reverse=is_reverse).wait())


class SilentGroup(ContextGroup):
    """Sends nothing: a rank gets its own messages, at once. The results are wrong, the work is the same."""

    def start_shift(self, tensor: torch.Tensor, *, is_reverse: bool = False) -> Any:
        """See ContextGroup."""
        return _Arrived(tensor)


class Trainer(Contender):
    """Forward and backward of one step.

    Args:
        config: the run.
        groups: the process groups of this rank.
        context_group: the class of the layers' context group.
    """

    def __init__(
        self,
        config: RunConfig,
        groups: ProcessGroupCollection,
        context_group: type[ContextGroup] = ContextGroup,
    ) -> None:
        (self._stage,) = stages = build_llama_model(
            config.model, groups, torch.device("cpu"), config.execution
        )
        initialize_weights(stages, config.model, config.training.seed)
        (batch,) = SameBatches(replace_batch(config), 0).batches
        self._batch = cut_batch(batch, Zigzag.of(groups.cp))
        self.group = context_group(groups.cp)
        if groups.cp.size() > 1:
            for layer in self._stage.decoder.layers:
                layer.self_attention.core_attention.group = self.group

    def step(self) -> float:
        """The loss of this rank's tokens."""
        tokens, labels, mask = self._batch[:3]
        learned = LearnedTokens(mask, 1.0)
        loss = self._stage(tokens, None, None, labels=labels, loss_mask=learned)
        loss.backward()
        self._stage.zero_grad()
        return loss.item()


def replace_batch(config: RunConfig) -> RunConfig:
    """The run with one sequence a step on this rank."""
    return replace(config, training=replace(config.training, global_batch_size=config.data_parallel_size))


class MessagesAlone(Contender):
    """The messages of a step of the ring, one after the other, without compute."""

    def __init__(self, group: WaitingGroup) -> None:
        self._group, self._messages = group, [torch.zeros(numel) for numel in group.numels]
        self.num_bytes = sum(message.nbytes for message in self._messages)
        """Bytes that a rank sends."""

    def step(self) -> float:
        """Send and receive all; there is no loss."""
        for message in self._messages:
            self._group.start_shift(message).wait()
        return 0.0


def build_contenders(groups: ProcessGroupCollection) -> dict[str, Any]:
    """All contenders by name, on this rank; `groups` have all ranks as a context-parallel group."""
    alone = copy.copy(groups)
    alone.cp = alone.dp_cp = dist.new_subgroups(1)[0]
    waiting = Trainer(context_run("p2p"), groups, WaitingGroup)
    found = {
        WHOLE: Trainer(context_run(None), alone),
        RING: Trainer(context_run("p2p"), groups),
        WAITING_RING: waiting,
        ALL_TO_ALL: Trainer(context_run("a2a"), groups),
        COMPUTE: Trainer(context_run("p2p"), groups, SilentGroup),
    }
    waiting.step()
    return found | {COMMUNICATION: MessagesAlone(waiting.group)}  # type: ignore[arg-type]


def set_speed(share: float, contenders: Mapping[str, Any]) -> float:
    """Limit the cable so that the messages alone take `share` of the compute alone; Mbit/s."""
    aim = share * min(time_on_ranks(contenders[COMPUTE].step, CPU) for _ in range(2))
    mbit = contenders[COMMUNICATION].num_bytes * 8e-6 / aim
    limit_speed(mbit)
    # Headers and waits make it slower, so the speed is corrected once by a measurement.
    mbit *= min(time_on_ranks(contenders[COMMUNICATION].step, CPU) for _ in range(2)) / aim
    limit_speed(mbit)
    return mbit


def measure(context: DeviceContext, shares: Sequence[float], rounds: int) -> list[dict[str, Any]]:
    """For each share: the speed, and the seconds of each contender in each round; equal on both ranks.

    Args:
        context: the device.
        shares: speeds of the cable: time of the ring's messages alone as a share of its compute alone.
        rounds: how often each contender takes a step.
    """
    contenders = build_contenders(initialize(context_run("p2p"), context))
    for contender in contenders.values():
        contender.step()
    timed = {name: partial(time_on_ranks, one.step, CPU) for name, one in contenders.items()}
    num_bytes = contenders[COMMUNICATION].num_bytes
    return [
        {"share": share, "mbit": set_speed(share, contenders), "bytes": num_bytes,
         "rounds": take_turns(timed, rounds)}
        for share in shares
    ]  # fmt: skip
