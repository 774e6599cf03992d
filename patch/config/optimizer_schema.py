"""Section `optimizer` of a run: the optimizer and its schedule."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from patch.config.choices import (
    Decay,
    GradientType,
    MomentType,
    MuonScaleMode,
    OffloadPolicy,
    OptimizerName,
    WsdDecay,
)
from patch.flag_field import flag


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """The optimizer and its schedule."""

    optimizer: OptimizerName = flag(
        "adam: AdamW; sgd: SGD with momentum, whose weight decay is added to the gradient as in torch; "
        "muon: Muon for matrices, AdamW for embedding, output layer and vectors",
        "adam",
    )
    sgd_momentum: float = flag("decay of SGD's momentum; 0: no state", 0.9, at_least=0, below=1)
    muon_momentum: float = flag("decay of Muon's momentum", 0.95, at_least=0, below=1)
    muon_use_nesterov: bool = flag("Muon: Nesterov's momentum", False)
    muon_num_ns_steps: int = flag("Muon: Newton-Schulz steps", 5, at_least=1, at_most=99)
    muon_scale_mode: MuonScaleMode = flag(
        "Muon: factor of the rate of a matrix [O, I]; spectral: sqrt(max(O, I)); unit_rms_norm: sqrt(O / I); "
        "shape_scaling: sqrt(max(1, O / I))",
        "spectral",
    )
    muon_extra_scale_factor: float = flag("Muon: another factor of the rate; 0.2 beside AdamW", 1.0, above=0)
    lr: float = flag("highest learning rate", above=0)
    min_lr: float = flag("learning rate at the end of the decay", 0.0, at_least=0)
    decoupled_lr: float | None = flag(
        "highest learning rate of embedding and output layer; none: as --lr", none="none", above=0
    )
    decoupled_min_lr: float | None = flag(
        "learning rate of embedding and output layer at the end of the decay; none: as --min-lr",
        none="none",
        at_least=0,
    )
    lr_warmup_iters: int = flag("steps of linear warm-up", 0, at_least=0)
    lr_warmup_init: float = flag("learning rate from which the warm-up rises", 0.0, at_least=0)
    lr_decay_style: Decay = flag(
        "decay of the learning rate after the warm-up; WSD: constant, then --lr-wsd-decay-style", "cosine"
    )
    lr_decay_iters: int | None = flag(
        "step at which the decay ends, warm-up included; 0: the last one", none=0
    )
    lr_wsd_decay_style: WsdDecay = flag("WSD: the decay of the last steps", "exponential")
    lr_wsd_decay_iters: int | None = flag("WSD: number of steps that decay; needed there", none=0)
    weight_decay: float = flag("weight decay; never on norms and biases", 0.1, at_least=0)
    decoupled_weight_decay: bool = flag("decay weights (AdamW), not their gradients (Adam)", True)
    adam_beta1: float = flag("decay of the first moment", 0.9, at_least=0, below=1)
    adam_beta2: float = flag("decay of the second moment", 0.95, at_least=0, below=1)
    adam_eps: float = flag("epsilon added to the root of the second moment", 1e-8, above=0)
    exp_avg_dtype: MomentType = flag(
        "dtype of the first moments: bf16 is rounded stochastically, 8bit has a scale for every 64 elements",
        "fp32",
    )
    exp_avg_sq_dtype: MomentType = flag("dtype of the second moments; see --exp-avg-dtype", "fp32")
    initial_loss_scale: float = flag("fp16: first scale of the loss; halved on overflow", 2.0**16, above=0)
    loss_scale_window: int = flag("fp16: good steps after which the scale doubles", 1000, at_least=1)
    min_loss_scale: float = flag("fp16: the scale is never halved below this", 1.0, above=0)
    hysteresis: int = flag(
        "fp16: overflows until the scale is halved, counted since it last doubled", 1, at_least=1
    )
    loss_scale: float | None = flag(
        "fp16: a constant scale of the loss; 0: one that follows overflows", none=0, above=0
    )
    reduce_bucket_size: int = flag(
        "elements of a bucket, the unit in which gradients are reduced and weights gathered",
        500_000_000,
        at_least=1,
    )
    ddp_pad_buckets_for_high_nccl_busbw: bool = flag(
        "pad buckets to multiples of 2^16 elements, which NCCL sends fastest between many GPUs", False
    )
    grad_reduce_in_bf16: bool = flag(
        "reduce gradients in bf16, sum in fp32: half the bytes; needs --use-distributed-optimizer", False
    )
    main_grads_dtype: GradientType = flag(
        "dtype in which gradients are summed and reduced; bf16: half the memory, less precise", "fp32"
    )
    gradient_accumulation_fusion: bool | None = flag(
        "linear layers' backward adds the weights' gradients to the main gradients itself, without rounding "
        "each micro-batch's to the weights' type; auto, the default: on GPUs",
        none="auto",
    )
    clip_grad: float = flag("largest global gradient norm; 0: no clipping", 1.0, at_least=0)
    optimizer_offload_policy: OffloadPolicy | None = flag(
        "optimizer states in host memory: false (none), static (a fraction) or auto (what does not fit)",
        none="false",
    )
    optimizer_offload_fraction: float = flag(
        "static: share of a process's states in host memory", 1.0, at_least=0, at_most=1
    )
    optimizer_offload_auto_threshold: int = flag(
        "auto: bytes of the GPU kept free in addition to the largest peak seen", 2 * 2**30, at_least=0
    )
    optimizer_offload_chunk_size: int | None = flag(
        "elements of a chunk, the unit in which states are placed and moved; 0: searched", none=0
    )
    optimizer_offload_streamed: float | None = flag(
        "share of the states in host memory that the GPU updates: copied there and back in each step; auto: "
        "0, or with --optimizer-offload-policy auto by measured times",
        none="auto",
        at_least=0,
        at_most=1,
    )
    param_persistence_threshold: int = flag(
        "--data-parallel-sharding parameters: parameters of fewer elements stay whole on every rank",
        100_000,
        at_least=0,
    )
    offload_folder: str | None = flag(
        "folder on a fast disk of each machine, for optimizer states that leave the GPU and have no room in "
        "host memory; several runs may share it",
        none="none",
    )
    optimizer_offload_host_share: float = flag(
        "--offload-folder: share of a process's host memory for its states", 0.5, at_least=0, at_most=1
    )
    cpu_offloading_weights: bool = flag(
        "--data-parallel-sharding parameters: keep weight shards in host memory and gather them for each "
        "pass",
        False,
    )
    cpu_offloading_weights_fraction: float | None = flag(
        "--cpu-offloading-weights: share of a process's weights; auto: what the device has no room for",
        1.0,
        none="auto",
        at_least=0,
        at_most=1,
    )
    simulated_device_memory: int | None = flag(
        "without a GPU: bytes of each process's simulated GPU; 0: no limit", none=0
    )

    def host_state_bytes(self, host_bytes: int) -> int:
        """Return the part of `host_bytes` for optimizer states; no limit without --offload-folder."""
        if self.offload_folder is None:
            return sys.maxsize
        return int(host_bytes * self.optimizer_offload_host_share)

    def fuses_gradients(self, *, cuda: bool) -> bool:
        """Return whether layers add their weights' gradients to the main gradients; by default on GPUs."""
        fuses = self.gradient_accumulation_fusion
        return cuda if fuses is None else fuses

    @property
    def rounds_stochastically(self) -> bool:
        """Whether a moment is rounded stochastically."""
        return "bf16" in (self.exp_avg_dtype, self.exp_avg_sq_dtype)
