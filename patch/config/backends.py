"""Which kernels serve which operation of a model: one table for the model, the plan and the log.

`choose_backends` decides by what is installed, the GPU and the run. The rules refuse what cannot be had;
`auto` takes the fastest that is installed and allowed. Facts behind the order of attention kernels:

    Hopper      cuDNN is 1.7 to 2.3 x as fast as FlashAttention-2 (huggingface/transformers#48163), and
                FlashAttention-3 1.14 x as fast as cuDNN (toolkits/benchmarks/RESULTS.md, 26 Nov 2026)
    Ampere, Ada FlashAttention-2 is as fast as cuDNN, or faster (the same thread)
    cuDNN       is not deterministic, which torch knows; the FlashAttentions are in deterministic mode
    FlashAttention-3    only Hopper; torch's SDPA, varlen_attn and our ring then use it instead of its own
    the ring    takes cuDNN where that is first, but for packed rows and windows: it builds a plan for each
                shape, of which these have many

Not used even if installed: flash-attn 2, because torch has its kernels; liger-kernel, because its SwiGLU
takes gate and up, and its RoPE q and k, as tensors with memory of their own, not the merged products, and its
loss needs the whole vocabulary on a rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from patch.config.choices import PRECISIONS, Precision
from patch.config.execution import Execution
from patch.config.positions import where
from patch.config.schema import ModelConfig, RunConfig
from patch.device import MachineFacts
from patch.families import TransformerImpl, traits_of
from patch.families.adapters import are_experts_single

FP8_MULTIPLE = 16
"""CUDA's 8-bit products need sizes that are multiples of it; so does a CPU run, which may go on on a GPU."""


def engine_obstacle(config: RunConfig) -> str:
    """Which setting of a run Transformer Engine's layers do not support; "" if there is none."""
    training, parallel = config.training, config.parallel
    if config.model.precision_align is not None:
        return f"{where('precision_align')} computes in transformers' order of operations"
    if config.model.num_experts:
        return "experts are of our own layers"
    if config.adapter.lora_rank:
        return "adapters are of our own layers"
    if config.model.kv_lora_rank is not None:
        return "latent attention is of our own layers"
    if not traits_of(config.model).is_llama_like:
        return f"its layers are built for LLaMA's parts, and {config.model.model_type} has others"
    if training.precision == "fp32":
        return f"{where('precision')} fp32: Transformer Engine multiplies float32 in TF32"
    if parallel.tp_comm_overlap and parallel.tensor_model_parallel_size > 1:
        return (
            f"{where('tp_comm_overlap')} is of our own layers; Transformer Engine's need user buffers for it"
        )
    return _fp8_obstacle(config) if config.has_8_bits else ""


def can_send_in_pieces(config: RunConfig) -> bool:
    """Whether TP's messages can travel while products are computed: pieces of torch's own, in our layers."""
    return (
        config.parallel.tensor_model_parallel_size > 1
        and config.model.transformer_impl != "transformer_engine"
        and config.model.precision_align is None
        and not (config.has_8_bits or config.adapter.quantize_base)
    )


def _fp8_obstacle(config: RunConfig) -> str:
    training, parallel = config.training, config.parallel
    fp8 = training.fp8
    if training.fp8_param_gather:
        return f"{where('fp8_param_gather')} is of our own layers"
    if training.cpu_offloading or training.recompute_granularity == "auto":
        flag = "cpu_offloading" if training.cpu_offloading else "recompute_granularity"
        return f"{where(flag)}: with activations its 8-bit weights would travel to the host too"
    most_in_bf16 = config.model.num_layers // parallel.pipeline_model_parallel_size
    if max(fp8.num_first_in_bf16, fp8.num_last_in_bf16) > most_in_bf16:
        return (
            f"{where('first_last_layers_bf16')}: at most {most_in_bf16} of the first and of the last layers"
        )
    tokens = config.sample_length * training.micro_batch_size // parallel.context_parallel_size
    if parallel.sequence_parallel:
        tokens //= parallel.tensor_model_parallel_size
    if tokens % FP8_MULTIPLE:
        needs = f"its 8-bit products need a multiple of {FP8_MULTIPLE}"
        return f"a rank has {tokens} tokens of a micro-batch, {needs}"
    return ""


SdpaKernel = Literal["flash", "cudnn", "efficient", "math"]
"""A kernel of torch's scaled_dot_product_attention on CUDA."""

_HOPPER = 9
_CUDNN_FIRST = (9, 10)
"""Major compute capabilities where of torch's own attention cuDNN's is the fastest: Hopper, and Blackwell for
servers."""


class Served(NamedTuple):
    """One row of the table."""

    operation: str
    by: str
    reason: str = ""
    """Why not by something faster; "" if there is nothing to say."""

    def __str__(self) -> str:
        return f"{self.operation} {self.by}" + (f" ({self.reason})" if self.reason else "")


@dataclass(frozen=True, slots=True)
class Backends:
    """The kernels that serve the operations of a model on one device."""

    transformer_impl: TransformerImpl
    sdpa: tuple[SdpaKernel, ...]
    """Kernels of attention in the order of preference, on CUDA; empty on a CPU, which has one."""
    has_flash_attention_3: bool
    """Whether torch's FlashAttention is replaced by flash-attn 3's."""
    is_fused: bool
    """Whether RoPE, activations and the loss are kernels of `patch/model/kernels`; else torch operations."""
    is_grouped: bool
    """Whether the products of a layer's experts are torch's grouped ones; otherwise one after the other."""
    rows: tuple[Served, ...]

    @property
    def line(self) -> str:
        """The table in one line, for the log."""
        return "; ".join(map(str, self.rows))


def choose_backends(
    model: ModelConfig,
    execution: Execution,
    machine: MachineFacts,
    *,
    cp_size: int = 1,
    faulty: Collection[SdpaKernel] = (),
) -> Backends:
    """Choose the kernels for a model that the rules have accepted.

    Args:
        model: the model.
        execution: how it is computed.
        machine: the device and the installed libraries; without GPUs the model is on the CPU.
        cp_size: ranks that share each sequence.
        faulty: kernels of attention that do not work there.
    """
    is_cuda = bool(machine.cuda_devices)
    is_aligned = model.precision_align is not None
    impl: TransformerImpl = model.transformer_impl or "local"
    has_fa3 = is_cuda and not is_aligned and _takes_flash_attention_3(model, machine)
    order = _sdpa_order(model, execution, machine, has_fa3) if is_cuda else ()
    sdpa = tuple(kernel for kernel in order if kernel not in faulty)
    is_fused = is_cuda and not is_aligned and "triton" in machine.libraries
    is_grouped = not is_aligned and _groups_products(model, execution, machine)
    backends = Backends(impl, sdpa, has_fa3, is_fused, is_grouped, ())
    rows = _rows(backends, model, execution, machine, cp_size)
    return dataclasses.replace(backends, rows=tuple(rows))


def backends_of(config: RunConfig, machine: MachineFacts) -> Backends:
    """`choose_backends` of a run.

    Args:
        config: the run.
        machine: see `choose_backends`.
    """
    cp_size = config.parallel.context_parallel_size
    return choose_backends(config.model, config.execution, machine, cp_size=cp_size)


def resolve_transformer_impl(config: RunConfig, machine: MachineFacts) -> tuple[RunConfig, list[str]]:
    """Replace `--transformer-impl auto` by Transformer Engine where it is installed and possible, else local.

    Args:
        config: the run.
        machine: this machine; all are taken to be equal.
    Returns:
        the run, and a line if Transformer Engine is installed and not taken.
    """
    if config.model.transformer_impl is not None:
        return config, []
    obstacle = no_transformer_engine(config, machine)
    impl: TransformerImpl = "local" if obstacle else "transformer_engine"
    model = dataclasses.replace(config.model, transformer_impl=impl)
    is_said = obstacle and machine.cuda_devices and "transformer_engine" in machine.libraries
    return dataclasses.replace(config, model=model), (
        [f"--transformer-impl auto: local, because {obstacle}"] if is_said else []
    )


def no_transformer_engine(config: RunConfig, machine: MachineFacts) -> str:
    """Why a run's layers cannot be Transformer Engine's; "" if they can."""
    if not machine.cuda_devices:
        return "Transformer Engine needs a GPU, and this machine has none"
    if "transformer_engine" not in machine.libraries:
        return "it is not installed: pip install --no-build-isolation 'transformer-engine[pytorch]'"
    return engine_obstacle(config)


def _takes_flash_attention_3(model: ModelConfig, machine: MachineFacts) -> bool:
    return (
        "flash_attn_3" in machine.libraries
        and machine.compute_capability[0] == _HOPPER
        and model.attention_backend in ("auto", "flash", "fused")
    )


def _groups_products(model: ModelConfig, execution: Execution, machine: MachineFacts) -> bool:
    """Elsewhere torch's grouped product is slow, or wrong where an expert has no token (Blackwell)."""
    if model.num_experts is None or are_experts_single(model, execution.adapter):
        return False
    is_hopper = bool(machine.cuda_devices) and machine.compute_capability[0] == _HOPPER
    return is_hopper and PRECISIONS[execution.precision].kept_as == "bf16"


def _sdpa_order(
    model: ModelConfig, execution: Execution, machine: MachineFacts, has_fa3: bool
) -> tuple[SdpaKernel, ...]:
    """The last two support fp32 and odd head sizes, without grouped heads; math materialises all scores."""
    wish = model.attention_backend
    if wish == "unfused":
        return ("math",)
    is_cudnn_fast = machine.compute_capability[0] in _CUDNN_FIRST and not has_fa3
    if execution.deterministic_mode:
        return ("flash", "efficient", "math")
    if wish == "fused" or is_cudnn_fast:
        return ("cudnn", "flash", "efficient", "math")
    return ("flash", "cudnn", "efficient", "math")


def _rows(
    backends: Backends, model: ModelConfig, execution: Execution, machine: MachineFacts, cp_size: int
) -> Iterator[Served]:
    """The table of a run."""
    if model.precision_align is not None:
        yield Served("all of a layer", "transformers' operations", "--precision-align")
        yield Served("loss", "torch's, from logits")
        return
    is_cuda, is_engine = bool(machine.cuda_devices), backends.transformer_impl == "transformer_engine"
    yield _attention(backends, model, execution, machine, cp_size)
    if is_cuda:
        yield _packed_rows(backends, model, execution.precision)
    traits = traits_of(model)
    norm = "rms_norm" if traits.normalization == "RMSNorm" else "layer_norm"
    yield Served("norm", "Transformer Engine" if is_engine else f"torch's {norm}")
    missing = "Triton is not installed" if is_cuda and not backends.is_fused else ""
    activations = {(True, "silu"): "SwiGLU", (False, "gelu_pytorch_tanh"): "bias and GELU"}
    fused = activations.get((traits.gated_linear_unit, traits.activation))
    if not traits.has_rope:
        yield Served("ALiBi", "channels of queries and keys, in the same kernel")
    for operation in filter(None, ("RoPE" if traits.has_rope else None, fused)):
        yield Served(operation, "one Triton kernel" if backends.is_fused else "torch operations", missing)
    yield _products(is_engine, execution.precision, machine)
    if model.num_experts is not None and is_cuda:
        why = "" if backends.is_grouped else "grouped ones need bf16 on Hopper, and no adapters"
        yield Served("products of experts", f"torch, {'one by one' if why else 'grouped'}", why)
    chunks = "chunks of tokens, without all logits"
    yield Served("loss", f"{chunks}, in two Triton kernels" if backends.is_fused else chunks, missing)
    yield Served("optimizer", "Triton" if is_cuda else "C++ if there is a compiler, else NumPy")


def _attention(
    backends: Backends, model: ModelConfig, execution: Execution, machine: MachineFacts, cp_size: int
) -> Served:
    flash = "FlashAttention-3" if backends.has_flash_attention_3 else "FlashAttention-2"
    reasons = []
    if not machine.cuda_devices:
        return Served("attention", "torch's SDPA")
    if backends.transformer_impl == "transformer_engine" and model.attention_backend != "local":
        if cp_size == 1:
            return Served("attention", "Transformer Engine")
        reasons.append("Transformer Engine's is not used with context parallelism")
    if machine.compute_capability[0] == _HOPPER and "flash_attn_3" not in machine.libraries:
        reasons.append("flash-attn 3 is not installed")
    if execution.deterministic_mode:
        reasons.append("cuDNN is not deterministic")
    names = {"flash": flash, "cudnn": "cuDNN", "efficient": "memory-efficient SDPA", "math": "all scores"}
    order = backends.sdpa
    if cp_size > 1 and execution.cp_comm_type == "p2p":
        is_last = order[:1] != ("cudnn",)  # the ring asks no second one
        order = tuple(kernel for kernel in order if not (kernel == "cudnn" and is_last))
    if execution.precision == "fp32":
        order = tuple(kernel for kernel in order if kernel not in ("flash", "cudnn"))
        reasons.append("the others take no fp32")
    return Served("attention", ", else ".join(names[kernel] for kernel in order[:2]), ", ".join(reasons))


def _packed_rows(backends: Backends, model: ModelConfig, precision: Precision) -> Served:
    """Rows of several sequences, and sliding windows."""
    operation = "packed rows and windows"
    if model.attention_backend == "unfused" or precision == "fp32":
        return Served(operation, "sequence by sequence", "the one kernel takes fp16 and bf16")
    flash = "FlashAttention-3" if backends.has_flash_attention_3 else "FlashAttention-2"
    return Served(operation, f"torch's varlen_attn by {flash}")


def _products(is_engine: bool, precision: Precision, machine: MachineFacts) -> Served:
    """The linear layers."""
    if is_engine:
        return Served("products", "Transformer Engine")
    what = "torch's scaled products" if PRECISIONS[precision].has_8_bits else "torch"
    is_missing = machine.cuda_devices and "transformer_engine" not in machine.libraries
    return Served("products", what, "Transformer Engine is not installed" if is_missing else "")
