"""Kernel selection: one table with the kernel of each operation, for the model, the plan and the log.

`choose_backends` depends on the installed libraries, the GPU and the run. The rules refuse an impossible
choice; `auto` takes the fastest kernel that is installed and allowed. Facts behind the attention order:

    Hopper           cuDNN is 1.7 to 2.3 x as fast as FlashAttention-2 (huggingface/transformers#48163);
                     FlashAttention-3 is 1.14 x as fast as cuDNN (toolkits/benchmarks/RESULTS.md, 26 Nov 2026)
    Ampere, Ada      FlashAttention-2 is at least as fast as cuDNN (huggingface/transformers#48163)
    determinism      cuDNN is never deterministic, and torch knows it; FlashAttention-2 and -3 can be
    FlashAttention-3 Hopper only; replaces FlashAttention-2 in torch's SDPA, varlen_attn and ring attention
    FlashAttention-4 the same on server Blackwell; never run
    flash-attn 2     the package replaces FlashAttention-2, but not in the ring, which calls torch's
                     operations; never run on a GPU
    ring attention   uses cuDNN if it is first in the order, but not for packed rows and windows: cuDNN builds
                     a plan for each shape, and these have many shapes

Not used even if installed: liger-kernel. Its SwiGLU takes gate and up, and its RoPE q and k, as separate
tensors, not as slices of the merged projections. Its loss needs the whole vocabulary on a rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from patch.config.choices import PRECISIONS, Precision
from patch.config.fields import with_values
from patch.config.positions import where
from patch.config.schema import ModelConfig, RunConfig
from patch.device import MachineFacts
from patch.families import TransformerImpl, attended_channels, traits_of
from patch.families.adapters import are_experts_single
from patch.features.table import CONFLICTS, ENGINE, FP8, WITHOUT_TP_OVERLAP


def why_not_transformer_engine(config: RunConfig) -> str:
    """Return the setting that Transformer Engine's layers do not support, or "" if there is none."""
    whys = (each.why(config) for each in CONFLICTS if each.refused is ENGINE and each.other.is_on(config))
    return next(whys, _fp8_obstacle(config) if FP8.is_on(config) else "")


def can_overlap_tp_comm(config: RunConfig) -> bool:
    """Return whether TP communication can overlap matmuls, in chunks; only our own layers can."""
    is_idle = any(each.is_on(config) for each in (ENGINE, *WITHOUT_TP_OVERLAP))
    return config.parallel.tensor_model_parallel_size > 1 and not is_idle


def _fp8_obstacle(config: RunConfig) -> str:
    training, parallel = config.training, config.parallel
    if training.cpu_offloading or training.recompute_granularity == "auto":
        flag = "cpu_offloading" if training.cpu_offloading else "recompute_granularity"
        return f"{where(flag)}: Transformer Engine would offload its fp8 weights with the activations"
    most_in_bf16 = config.model.num_layers // parallel.pipeline_model_parallel_size
    if max(config.bf16_ends) > most_in_bf16:
        return (
            f"{where('first_last_layers_bf16')}: at most {most_in_bf16} of the first and of the last layers"
        )
    tokens = config.sample_length * training.micro_batch_size // parallel.context_parallel_size
    if parallel.sequence_parallel:
        tokens //= parallel.tensor_model_parallel_size
    multiple = PRECISIONS[training.precision].size_multiple
    if tokens % multiple:
        needs = f"its fp8 matmuls need a multiple of {multiple}"
        return f"a rank has {tokens} tokens of a micro-batch, {needs}"
    return ""


AttentionKernel = Literal["flash_attn", "flash", "cudnn", "efficient", "math"]
"""The package flash-attn 2, and torch's SDPA kernels."""
FlashVersion = Literal["FA2", "FA3", "FA4"]
"""FlashAttention of torch's operations; FA3 and FA4 are packages that replace torch's own FA2."""

_HOPPER = 9
_LARGEST_HEAD = 256
"""Channels of a head that flash-attn 2 supports."""
_LARGEST_NORM = 8192
"""Channels of a row that the registers of a program of the Triton norm hold."""
_FLASH_PACKAGES: dict[FlashVersion, tuple[str, int]] = {
    "FA3": ("flash_attn_3", _HOPPER),
    "FA4": ("flash_attn_4", 10),
}
"""Package (name in MachineFacts) and major compute capability of the GPUs where it is used."""
FLASH_PACKAGES = frozenset(package for package, _ in _FLASH_PACKAGES.values())
"""Packages that may fail to load."""
_CUDNN_FIRST = (9, 10)
"""Major compute capabilities where cuDNN is torch's fastest attention: Hopper and server Blackwell."""


_PACKAGE = "the package flash-attn 2"
_FLASH_NAMES = {version: f"FlashAttention-{version[-1]}" for version in get_args(FlashVersion)}


class KernelChoice(NamedTuple):
    """One row of the kernel table."""

    operation: str
    by: str
    reason: str = ""
    """Why a faster kernel is not used, or "" if there is no reason to log."""

    def __str__(self) -> str:
        return f"{self.operation} {self.by}" + (f" ({self.reason})" if self.reason else "")


@dataclass(frozen=True, slots=True)
class Backends:
    """Kernels of a model's operations on one device."""

    transformer_impl: TransformerImpl
    attention: tuple[AttentionKernel, ...]
    """Kernels in order of preference on CUDA; empty on a CPU, which has a single kernel."""
    flash: FlashVersion
    """FlashAttention of SDPA, varlen_attn and ring attention."""
    is_fused: bool
    """Whether RoPE, activations and loss use the kernels of `patch/model/kernels`, not torch operations."""
    is_norm_fused: bool
    """Whether the norms in front of attention and MLP are Triton's; backward adds the residual's gradient."""
    is_grouped: bool
    """Whether a layer's experts use torch's grouped matmul, not one matmul per expert."""
    choices: tuple[KernelChoice, ...]

    @property
    def line(self) -> str:
        """The table in one line, for the log."""
        return "; ".join(map(str, self.choices))


def choose_backends(
    config: RunConfig, machine: MachineFacts, *, faulty: Collection[AttentionKernel] = ()
) -> Backends:
    """Choose the kernels for a model that the rules have accepted.

    Args:
        machine: device and installed libraries; without GPUs the model runs on the CPU.
        faulty: attention kernels that do not work on this machine.
    """
    model = config.model
    is_cuda = bool(machine.cuda_devices)
    is_aligned = model.precision_align is not None
    impl: TransformerImpl = model.transformer_impl or "local"
    order = tuple(kernel for kernel in attention_order(config, machine) if kernel not in faulty)
    is_fused = is_cuda and not is_aligned and "triton" in machine.libraries
    is_grouped = not is_aligned and _groups_products(config, machine)
    is_norm_fused = is_fused and impl == "local" and _fuses_norms(config)
    version = flash_version(model, machine)
    backends = Backends(impl, order, version, is_fused, is_norm_fused, is_grouped, ())
    choices = _kernel_table(backends, config, machine)
    return dataclasses.replace(backends, choices=tuple(choices))


def resolve_transformer_impl(config: RunConfig, machine: MachineFacts) -> tuple[RunConfig, list[str]]:
    """Replace `--transformer-impl auto` by Transformer Engine if it is installed and possible, else by local.

    All machines are assumed to be equal to `machine`. Return the run, and a log line if Transformer Engine is
    installed but not used.
    """
    if config.model.transformer_impl is not None:
        return config, []
    obstacle = no_transformer_engine(config, machine)
    impl: TransformerImpl = "local" if obstacle else "transformer_engine"
    is_said = obstacle and machine.cuda_devices and "transformer_engine" in machine.libraries
    return with_values(config, transformer_impl=impl), (
        [f"--transformer-impl auto: local, because {obstacle}"] if is_said else []
    )


def no_transformer_engine(config: RunConfig, machine: MachineFacts) -> str:
    """Return why a run's layers cannot be Transformer Engine's, or "" if they can."""
    if not machine.cuda_devices:
        return "Transformer Engine needs a GPU, and this machine has none"
    if "transformer_engine" not in machine.libraries:
        return "it is not installed: pip install --no-build-isolation 'transformer-engine[pytorch]'"
    return why_not_transformer_engine(config)


def flash_version(model: ModelConfig, machine: MachineFacts) -> FlashVersion:
    """Return FA3 or FA4 if its package is installed for this GPU and allowed, else FA2."""
    if _may_replace_flash(model, machine):
        for version, (package, major) in _FLASH_PACKAGES.items():
            if package in machine.libraries and machine.compute_capability[0] == major:
                return version
    return "FA2"


def _may_replace_flash(model: ModelConfig, machine: MachineFacts) -> bool:
    is_asked = model.attention_backend in ("auto", "flash", "fused")
    return bool(machine.cuda_devices) and model.precision_align is None and is_asked


def _fuses_norms(config: RunConfig) -> bool:
    """A norm that is recomputed alone (AC=sel) cannot add the gradient of the residual."""
    traits, is_kept = traits_of(config.model), config.training.recompute_granularity != "selective"
    is_before = traits.normalization == "RMSNorm" and traits.norm_placement != "behind"
    return is_before and is_kept and config.model.hidden_size <= _LARGEST_NORM


def _groups_products(config: RunConfig, machine: MachineFacts) -> bool:
    """Off Hopper, grouped matmuls are slow, or wrong for experts without tokens (Blackwell)."""
    if config.model.num_experts is None or are_experts_single(config.model, config.adapter):
        return False
    is_hopper = bool(machine.cuda_devices) and machine.compute_capability[0] == _HOPPER
    return is_hopper and PRECISIONS[config.training.precision].kept_as == "bf16"


def attention_order(config: RunConfig, machine: MachineFacts) -> tuple[AttentionKernel, ...]:
    """Return the allowed attention kernels, the fastest first; none on a CPU.

    The last two support fp32 and odd head sizes, not grouped heads; math stores all scores.
    """
    model = config.model
    if not machine.cuda_devices:
        return ()
    if model.attention_backend == "unfused":
        return ("math",)
    flash: tuple[AttentionKernel, ...] = ("flash",)
    is_version_2 = flash_version(model, machine) == "FA2"
    has_package = "flash_attn" in machine.libraries and attended_channels(model) <= _LARGEST_HEAD
    if is_version_2 and has_package and _may_replace_flash(model, machine):
        flash = ("flash_attn", "flash")
    is_cudnn_first = machine.compute_capability[0] in _CUDNN_FIRST and is_version_2
    if config.training.deterministic_mode:
        return (*flash, "efficient", "math")
    if model.attention_backend == "fused" or is_cudnn_first:
        return ("cudnn", *flash, "efficient", "math")
    return (*flash, "cudnn", "efficient", "math")


def _kernel_table(backends: Backends, config: RunConfig, machine: MachineFacts) -> Iterator[KernelChoice]:
    model, precision = config.model, config.training.precision
    if model.precision_align is not None:
        yield KernelChoice("all of a layer", "transformers' operations", "--precision-align")
        yield KernelChoice("loss", "torch's, from logits")
        return
    is_cuda, is_engine = bool(machine.cuda_devices), backends.transformer_impl == "transformer_engine"
    yield _attention(backends, config, machine)
    if is_cuda:
        yield _packed_rows(backends, config)
    traits = traits_of(model)
    norm = "rms_norm" if traits.normalization == "RMSNorm" else "layer_norm"
    own = "Triton before attention and MLP, else " if backends.is_norm_fused else ""
    yield KernelChoice("norm", "Transformer Engine" if is_engine else f"{own}torch's {norm}")
    missing = "Triton is not installed" if is_cuda and not backends.is_fused else ""
    activations = {(True, "silu"): "SwiGLU", (False, "gelu_pytorch_tanh"): "bias and GELU"}
    fused = activations.get((traits.gated_linear_unit, traits.activation))
    if not traits.has_rope:
        yield KernelChoice("ALiBi", "channels of queries and keys, in the same kernel")
    for operation in filter(None, ("RoPE" if traits.has_rope else None, fused)):
        yield KernelChoice(
            operation, "one Triton kernel" if backends.is_fused else "torch operations", missing
        )
    yield _products(is_engine, precision, machine)
    if model.num_experts is not None and is_cuda:
        why = "" if backends.is_grouped else "grouped ones need bf16 on Hopper, and no adapters"
        yield KernelChoice("products of experts", f"torch, {'one by one' if why else 'grouped'}", why)
    chunks = "chunks of tokens, without all logits"
    has_kernel = backends.is_fused and model.final_logit_softcapping is None
    yield KernelChoice("loss", f"{chunks}, in two Triton kernels" if has_kernel else chunks, missing)
    yield KernelChoice("optimizer", "Triton" if is_cuda else "C++ if there is a compiler, else NumPy")


def _attention(backends: Backends, config: RunConfig, machine: MachineFacts) -> KernelChoice:
    cp_size = config.parallel.context_parallel_size
    reasons = []
    if config.model.attn_logit_softcapping is not None:
        if "flash_attn" in backends.attention and config.training.precision != "fp32":
            return KernelChoice("attention", _PACKAGE)
        why = "no kernel of torch caps scores" if machine.cuda_devices else ""
        return KernelChoice("attention", "all scores of some tokens at a time", why)
    if not machine.cuda_devices:
        return KernelChoice("attention", "torch's SDPA")
    if backends.transformer_impl == "transformer_engine" and config.model.attention_backend != "local":
        if cp_size == 1:
            return KernelChoice("attention", "Transformer Engine")
        reasons.append("Transformer Engine's is not used with context parallelism")
    if machine.compute_capability[0] == _HOPPER and "flash_attn_3" not in machine.libraries:
        reasons.append("flash-attn 3 is not installed")
    if config.training.deterministic_mode:
        reasons.append("cuDNN is not deterministic")
    names = {
        "flash_attn": _PACKAGE, "flash": _FLASH_NAMES[backends.flash], "cudnn": "cuDNN",
        "efficient": "memory-efficient SDPA", "math": "all scores",
    }  # fmt: skip
    order = backends.attention
    if _is_ring(config) or order[:1] != ("flash_attn",):  # it is no fallback of torch's kernels
        order = tuple(kernel for kernel in order if kernel != "flash_attn")
    if _is_ring(config):
        is_last = order[:1] != ("cudnn",)  # ring attention never falls back to cuDNN
        order = tuple(kernel for kernel in order if not (kernel == "cudnn" and is_last))
    if config.training.precision == "fp32":
        order = tuple(kernel for kernel in order if kernel in ("efficient", "math"))
        reasons.append("the others take no fp32")
    return KernelChoice(
        "attention", ", else ".join(names[kernel] for kernel in order[:2]), ", ".join(reasons)
    )


def _is_ring(config: RunConfig) -> bool:
    return config.parallel.context_parallel_size > 1 and config.parallel.cp_comm_type == "p2p"


def _packed_rows(backends: Backends, config: RunConfig) -> KernelChoice:
    operation = "packed rows and windows"
    if config.model.attention_backend == "unfused" or config.training.precision == "fp32":
        return KernelChoice(operation, "sequence by sequence", "the one kernel takes fp16 and bf16")
    if "flash_attn" in backends.attention and not _is_ring(config):
        return KernelChoice(operation, _PACKAGE)
    if config.model.attn_logit_softcapping is not None:
        return KernelChoice(operation, "sequence by sequence", "no kernel of torch caps scores")
    return KernelChoice(operation, f"torch's varlen_attn by {_FLASH_NAMES[backends.flash]}")


def _products(is_engine: bool, precision: Precision, machine: MachineFacts) -> KernelChoice:
    """Return the row of the linear layers (matmuls)."""
    if is_engine:
        return KernelChoice("products", "Transformer Engine")
    what = "torch's scaled products" if PRECISIONS[precision].has_casts else "torch"
    is_missing = machine.cuda_devices and "transformer_engine" not in machine.libraries
    return KernelChoice("products", what, "Transformer Engine is not installed" if is_missing else "")
