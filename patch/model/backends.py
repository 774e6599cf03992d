"""The kernels of a model that is built on a device (`patch.config.backends`): those that work there."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from patch.config.backends import Backends, SdpaKernel, choose_backends
from patch.config.execution import Execution
from patch.config.schema import ModelConfig
from patch.device import MachineFacts
from patch.distributed.collectives import all_gather_object
from patch.families import attended_channels
from patch.logger import get_logger
from patch.model.attention import CausalAttention
from patch.model.context_parallel import ContextParallelAttention

_logger = get_logger(__name__)
_CPU = MachineFacts(cuda_devices=0, cpu_cores=1)


def backends_on(
    device: torch.device,
    model: ModelConfig,
    execution: Execution,
    groups: ProcessGroupCollection,
    upstream: TransformerConfig,
) -> Backends:
    """The kernels of a model on a device. It sets whether torch's FlashAttention is flash-attn 3's.

    On a GPU a collective over the job: what fails on one rank is used by none.

    Args:
        device: of the weights.
        model: the model.
        execution: how it is computed.
        groups: megatron-core's process groups.
        upstream: the model as megatron-core has it.
    """
    machine = MachineFacts.probe() if device.type == "cuda" else _CPU
    cp_size = groups.cp.size()
    backends = choose_backends(model, execution, machine, cp_size=cp_size)
    if machine.cuda_devices and _use_flash_attention_3(backends.has_flash_attention_3) is not None:
        machine = dataclasses.replace(machine, libraries=machine.libraries - {"flash_attn_3"})
        backends = choose_backends(model, execution, machine, cp_size=cp_size)
    if machine.cuda_devices:
        is_engine = backends.transformer_impl == "transformer_engine" and model.attention_backend != "local"
        is_ring = cp_size > 1 and execution.cp_comm_type == "p2p"
        tried = () if is_engine and cp_size == 1 else backends.sdpa  # else others' kernels
        own = faults_of(tried, upstream, model.seq_length, attended_channels(model), device, is_ring=is_ring)
        faults = {kernel: why for found in all_gather_object(own) for kernel, why in found.items()}
        for kernel, why in faults.items():
            _logger.warning("attention by %s fails here, and is not used: %s", kernel, why)
        backends = choose_backends(model, execution, machine, cp_size=cp_size, faulty=faults)
        _logger.info("kernels: %s", backends.line)
    return backends


def faults_of(
    kernels: Sequence[SdpaKernel],
    config: TransformerConfig,
    length: int,
    head_size: int,
    device: torch.device,
    *,
    is_ring: bool = False,
) -> dict[SdpaKernel, str]:
    """The kernels that raise, forward and backward, at one sequence of a model, and what they say.

    torch goes on to the next kernel by itself, which is no fault, where it knows before that one cannot be
    used, but not where cuDNN finds no plan or a launch fails. Of each process: its own heads, all tokens.

    Args:
        kernels: to be tried; not math, which needs memory for all scores and is torch's own arithmetic.
        config: of the model.
        length: S, tokens of a sequence.
        head_size: channels of a head in attention.
        device: where.
        is_ring: whether context parallelism's ring calls them: cuDNN, or one that needs no trial.
    """
    found: dict[SdpaKernel, str] = {}
    num_ranks = config.tensor_model_parallel_size * (1 if is_ring else config.context_parallel_size)
    kind: Callable[..., CausalAttention] = CausalAttention
    if is_ring:
        kernels = [each for each in kernels if each == "cudnn"]
        length //= config.context_parallel_size
        alone = SimpleNamespace(cp=SimpleNamespace(rank=lambda: 0, size=lambda: 1))
        kind = partial(ContextParallelAttention, cp_comm_type="p2p", pg_collection=alone)
    num_groups = config.num_query_groups or 1
    counts = config.num_attention_heads, num_groups, num_groups
    for kernel in (each for each in kernels if each != "math"):
        attend = kind(
            config=config, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self",
            kernels=(kernel,),
        )  # fmt: skip
        try:
            heads = [
                torch.zeros(
                    length, 1, max(1, count // num_ranks), head_size,
                    dtype=config.params_dtype, device=device, requires_grad=True,
                )
                for count in counts
            ]  # fmt: skip
            with warnings.catch_warnings(action="ignore"):  # torch's reasons to skip a kernel
                attend(*heads, None).sum().backward()
            torch.get_device_module(device).synchronize(device)
        except torch.OutOfMemoryError:
            pass  # of the whole run's memory nothing is known here
        except RuntimeError as error:
            if not is_skipped(error):
                found[kernel] = (str(error).strip().splitlines() or ["no reason"])[0]
    return found


def is_skipped(error: RuntimeError) -> bool:
    """Whether torch's SDPA says that it would go on to the next kernel, if there was one."""
    return str(error).startswith(("No available kernel", "No viable backend"))


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
