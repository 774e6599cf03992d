"""The kernels of a model that is built on a device (`patch.config.backends`), and flash-attn 3 in torch."""

from __future__ import annotations

import dataclasses

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.config.backends import Backends, choose_backends
from patch.config.execution import Execution
from patch.config.schema import ModelConfig
from patch.device import MachineFacts
from patch.logger import get_logger

_logger = get_logger(__name__)
_CPU = MachineFacts(cuda_devices=0, cpu_cores=1)


def backends_on(
    device: torch.device, model: ModelConfig, execution: Execution, groups: ProcessGroupCollection
) -> Backends:
    """What serves a model on a device. It sets whether torch's FlashAttention is flash-attn 3's.

    Args:
        device: of the weights.
        model: the model.
        execution: how it is computed.
        groups: megatron-core's process groups.
    """
    machine = MachineFacts.probe() if device.type == "cuda" else _CPU
    cp_size = groups.cp.size()
    backends = choose_backends(model, execution, machine, cp_size=cp_size)
    if machine.cuda_devices and _use_flash_attention_3(backends.has_flash_attention_3) is not None:
        machine = dataclasses.replace(machine, libraries=machine.libraries - {"flash_attn_3"})
        backends = choose_backends(model, execution, machine, cp_size=cp_size)
    if machine.cuda_devices:
        _logger.info("kernels: %s", backends.line)
    return backends


def _use_flash_attention_3(is_wanted: bool) -> Exception | None:
    """Switch torch's FlashAttention for this process; the error if the library cannot be loaded.

    From then on SDPA, varlen_attn and context parallelism's ring run its kernels.
    """
    from torch.nn import attention  # its names differ between versions of torch only where it is not needed

    is_active = attention.current_flash_attention_impl() == "FA3"
    if is_active and not is_wanted:
        attention.restore_flash_attention_impl()
    if is_wanted and not is_active:
        try:
            attention.activate_flash_attention_impl("FA3")
        except (ImportError, OSError, RuntimeError) as error:
            _logger.warning("flash-attn 3 is installed, but cannot be used: %s", error)
            return error
    return None
