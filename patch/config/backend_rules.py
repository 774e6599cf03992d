"""The rules of GPUs, `--transformer-impl` and `--attention-backend`, as those in rules.py."""

from __future__ import annotations

from collections.abc import Iterator

from patch.config.backends import no_transformer_engine
from patch.config.positions import where
from patch.config.refusal import refuse
from patch.config.schema import RunConfig
from patch.device import MachineFacts
from patch.errors import ConfigError


def gpus_can_be_used(config: RunConfig, machine: MachineFacts) -> None:
    """The machine's GPUs, if it has any, are not left idle without a word."""
    if machine.unusable_gpus:
        raise ConfigError(f"{machine.unusable_gpus}; CUDA_VISIBLE_DEVICES='' trains on the CPU")


def backends_exist(config: RunConfig, machine: MachineFacts) -> None:
    """Layers of Transformer Engine are asked for where they can be built."""
    if config.model.transformer_impl == "transformer_engine":
        obstacle = no_transformer_engine(config, machine)
        if obstacle:
            refuse("transformer_impl", "transformer_engine", "auto or local", obstacle)


def backend_notes(config: RunConfig, machine: MachineFacts) -> Iterator[str]:
    """A kernel of attention that has no effect."""
    wish, flag = config.model.attention_backend, where("attention_backend")
    if not machine.cuda_devices and wish in ("flash", "unfused", "local"):
        yield f"{flag} has no effect on the CPU: attention is torch's SDPA either way"
    elif machine.cuda_devices and config.model.precision_align is not None and wish != "auto":
        yield f"{flag} has no effect with {where('precision_align')}"
    elif machine.cuda_devices and config.parallel.cp_comm_type == "p2p" and wish in ("fused", "unfused"):
        if config.parallel.context_parallel_size > 1:
            yield f"{flag} has no effect with {where('cp_comm_type')} p2p"
