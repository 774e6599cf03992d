"""Whether a run fits a machine: memory of its heaviest rank, and of a node's host."""

from __future__ import annotations

from typing import NamedTuple

from patch.config import RunConfig
from patch.device import MachineFacts
from patch.plan.activations import ActivationPeak, activation_peak
from patch.plan.memory import (
    eight_bit_bytes,
    needed_bytes,
    staging_bytes,
    state_on_device,
    usable_device_memory,
    whole_bytes,
)


class RankMemory(NamedTuple):
    """Bytes on the device of one process."""

    pp_rank: int
    state: int
    """Model state, without optimizer states that `auto` places."""
    staging: int
    """Buffers in which gradients are collected and travel, beside the main gradients."""
    whole: int
    """Weights that are whole for a pass, where replicas share them."""
    eight_bits: int
    """8-bit weights that are kept during a step."""
    activations: ActivationPeak

    @property
    def total(self) -> int:
        """All together."""
        return self.state + self.staging + self.whole + self.eight_bits + self.activations.total


def heaviest_rank(config: RunConfig, *, cuda: bool) -> RankMemory:
    """The pipeline rank that needs the most memory for model state and activations together."""
    ranks = (
        RankMemory(
            rank,
            state_on_device(config, rank),
            staging_bytes(config, rank, cuda=cuda),
            whole_bytes(config, rank),
            eight_bit_bytes(config, rank),
            activation_peak(config, rank, cuda=cuda),
        )
        for rank in range(config.parallel.pipeline_model_parallel_size)
    )
    return max(ranks, key=lambda rank: rank.total)


class Fit(NamedTuple):
    """What a run needs and what it may use, in bytes; 0 of usable: not known."""

    device_needed: int
    device_usable: int
    host_needed: int
    host_usable: int
    """Bytes of one machine."""

    @property
    def is_on_device(self) -> bool:
        """Whether the device has room."""
        return not 0 < self.device_usable < self.device_needed

    @property
    def is_on_host(self) -> bool:
        """Whether the host has room."""
        return not 0 < self.host_usable < self.host_needed

    @property
    def is_whole(self) -> bool:
        """Whether device and host have room."""
        return self.is_on_device and self.is_on_host


def fit_of(config: RunConfig, machine: MachineFacts) -> Fit:
    """Whether a run fits; a GPU is planned with 95 % of its memory less 1 GiB.

    Of `--precision-align`, which keeps more activations, only the model state counts. The host of a CPU run
    holds all, that of GPUs what they offload.
    """
    on_device, on_host = needed_bytes(config, machine)
    if config.model.precision_align is None:
        rank = heaviest_rank(config, cuda=bool(machine.cuda_devices))
        of_process = rank.activations.on_host + (0 if machine.cuda_devices else rank.total - rank.state)
        on_device, on_host = rank.total, on_host + of_process * config.parallel.nproc_per_node
    return Fit(on_device, usable_device_memory(config, machine), on_host, machine.host_memory_bytes)
