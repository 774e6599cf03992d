"""The kernels that a model uses on a device: the kernels of `patch.features.backends` that work there."""

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

from patch.config.schema import RunConfig
from patch.device import MachineFacts
from patch.distributed.collectives import all_gather_object
from patch.families import attended_channels
from patch.features.backends import (
    FLASH_PACKAGES,
    AttentionKernel,
    Backends,
    FlashVersion,
    attention_order,
    choose_backends,
    flash_version,
)
from patch.logger import get_logger
from patch.model.attention.context_parallel import ContextParallelAttention
from patch.model.attention.core_attention import CausalAttention

_logger = get_logger(__name__)
_FAILURES = (RuntimeError, ImportError, OSError, AttributeError, TypeError)
"""Errors of a kernel that does not work; the last four are those of a package of another version."""
_CPU = MachineFacts(cuda_devices=0, cpu_cores=1)


def backends_on(
    device: torch.device,
    config: RunConfig,
    groups: ProcessGroupCollection,
    upstream: TransformerConfig,
) -> Backends:
    """Return the kernels of a model on a device, and switch torch's FlashAttention to its version.

    On a GPU this is a collective over the job: a kernel that fails on one rank is used on no rank.
    """
    machine = MachineFacts.probe() if device.type == "cuda" else _CPU
    if not machine.cuda_devices:
        return choose_backends(config, machine)
    model, cp_size = config.model, groups.cp.size()
    if any(all_gather_object(_activate_flash(flash_version(model, machine)) is not None)):
        machine = dataclasses.replace(machine, libraries=machine.libraries - FLASH_PACKAGES)
        _activate_flash("FA2")
    is_engine = model.transformer_impl == "transformer_engine" and model.attention_backend != "local"
    is_ring = cp_size > 1 and config.parallel.cp_comm_type == "p2p"
    has_own = is_engine and cp_size == 1
    tried = () if has_own else attention_order(config, machine)
    own = failing_kernels(
        tried, upstream, model.seq_length, attended_channels(model), device, is_ring=is_ring
    )
    faults = {kernel: why for found in all_gather_object(own) for kernel, why in found.items()}
    for kernel, why in faults.items():
        said = "attention kernel %s failed its trial on this GPU and is not used: %s"
        _logger.warning(said, kernel, why)
    backends = choose_backends(config, machine, faulty=faults)
    _logger.info("kernels: %s", backends.line)
    return backends


def failing_kernels(
    kernels: Sequence[AttentionKernel],
    config: TransformerConfig,
    length: int,
    head_size: int,
    device: torch.device,
    *,
    is_ring: bool = False,
) -> dict[AttentionKernel, str]:
    """Return the kernels that raise in forward and backward of one sequence, with their error messages.

    torch itself skips a kernel that it knows to be unsuitable, which is no fault. It does not skip a kernel
    if cuDNN finds no plan or a launch fails. Each process tries its own heads and all tokens.

    Args:
        kernels: to try; "math" is skipped, because it needs memory for all scores and cannot fail otherwise.
        length: S, tokens of a sequence.
        head_size: channels of a head in attention.
        is_ring: whether the CP ring calls the kernels; only cuDNN needs a trial then.
    """
    found: dict[AttentionKernel, str] = {}
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
            pass  # the memory of the whole run is not known here
        except _FAILURES as error:
            if not is_skipped(error):
                found[kernel] = (str(error).strip().splitlines() or ["no reason"])[0]
    return found


def is_skipped(error: Exception) -> bool:
    """Return whether the error says that SDPA skipped the kernel."""
    return str(error).startswith(("No available kernel", "No viable backend"))


def _activate_flash(version: FlashVersion) -> Exception | None:
    """Switch torch's FlashAttention (SDPA, varlen_attn, CP ring) to a version; return the error, or None."""
    from torch.nn import attention  # the names are missing only in torch versions that do not get here

    active = attention.current_flash_attention_impl() or "FA2"
    if active != version and active != "FA2":
        attention.restore_flash_attention_impl()
    if active != version and version != "FA2":
        try:
            attention.activate_flash_attention_impl(version)
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            said = "flash-attn %s failed to load and is not used: %s; reinstall it for this torch version"
            _logger.warning(said, version[-1], error)
            return error
    return None
