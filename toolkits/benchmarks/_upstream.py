"""The contenders of others. That of megatron-core: its DistributedDataParallel and DistributedOptimizer.

It trains the same model on the same batches, set up as in Megatron-LM's training loop. It gets favourable
settings: our bucket size (with its default of 40 million parameters the small model would be one bucket),
torch's fused Adam (its own loop is several times slower on a CPU), and as one more contender its
reduce-scatter by all-to-all, because gloo's reduce-scatter moves as much as an all-reduce. And DeepSpeed's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer, utils
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
    param_and_grad_buffer,
)
from megatron.core.extensions import transformer_engine
from megatron.core.optimizer import OptimizerConfig, clip_grads, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils

from patch.compat import cpu
from patch.config.schema import RunConfig
from patch.data import Batch
from patch.model import LlamaModel, build_llama_model, initialize_weights
from toolkits.benchmarks._contenders import SameBatches

_REDUCE_SCATTER = param_and_grad_buffer.dist_reduce_scatter_func
_CUDA_MODULES = (
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.distributed.distributed_data_parallel",
    "megatron.core.optimizer.optimizer",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.grad_scaler",
    "megatron.core.transformer.dot_product_attention",
    "megatron.core.transformer.utils",
)
"""What upstream's optimizer and attention need on a CPU beyond `patch.compat`; runs do not use them."""
def prepare_cpu() -> None:
    """Let upstream's model, DDP and optimizer run without CUDA in this process; call it after `cpu.apply`."""
    for module in _CUDA_MODULES:
        cpu.replace_torch(module)
    # Upstream's own choice where Transformer Engine is not installed, whose Adam, norm and scaling need CUDA.
    vars(optimizer).update(Adam=torch.optim.AdamW, USING_PYTORCH_OPTIMIZER=True)
    for module in (clip_grads, optimizer.optimizer):
        vars(module).update(
            multi_tensor_applier=utils.local_multi_tensor_applier,
            l2_norm_impl=utils.local_multi_tensor_l2_norm,
            multi_tensor_scale_impl=utils.local_multi_tensor_scale,
        )
    vars(moe_utils).setdefault("te_general_gemm", None)
    multi_latent_attention.HAVE_TE = transformer_engine.HAVE_TE
    get_type = torch.Tensor.type

    def type_as_on_cuda(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Upstream compares type names with "torch.cuda.FloatTensor" (distrib_optimizer.py:361, 420, 582)."""
        result = get_type(tensor, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.") if isinstance(result, str) else result

    vars(torch)["Tensor"].type = type_as_on_cuda


class UpstreamTrainer:
    """Upstream's training loop around one of our models.

    Args:
        config: the run, whose optimizer and bucket settings are given to upstream.
        groups: the process groups of the job.
        device: the device of this rank.
        overlap: fields of DistributedDataParallelConfig that overlap messages with compute.
        offload: share of the optimizer's states on the CPU (HybridDeviceOptimizer, its copies overlapped).
        change: what is changed about the model before its optimizer is built.
    """

    def __init__(
        self,
        config: RunConfig,
        groups: ProcessGroupCollection,
        device: torch.device,
        overlap: Mapping[str, bool],
        offload: float = 0.0,
        change: Callable[[LlamaModel], None] = lambda model: None,
    ) -> None:
        self._config, self._groups = config, groups
        batches = SameBatches(config, groups.dp.rank()).batches
        self._batches = [batch.to(device) for batch in batches]
        (model,) = build_llama_model(config.model, groups, device, config.execution)
        initialize_weights([model], config.model, config.training.seed)
        change(model)
        model.config.calculate_per_token_loss = False  # upstream's default
        param_and_grad_buffer.dist_reduce_scatter_func = _REDUCE_SCATTER
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True,
            bucket_size=config.optimizer.reduce_bucket_size, **overlap,
        )  # fmt: skip
        self.model = DistributedDataParallel(model.config, settings, model)
        self._reduce_scatter = param_and_grad_buffer.dist_reduce_scatter_func
        self._optimizer = get_megatron_optimizer(
            _settings(config, offload), [self.model], use_gloo_process_groups=False
        )
        if not offload:  # with offload upstream sets it itself
            for group in self._optimizer.param_groups:
                group["fused"] = True
        model.config.no_sync_func = self.model.no_sync
        model.config.grad_scale_func = self._optimizer.scale_loss
        model.config.finalize_model_grads_func = finalize_model_grads

    def step(self) -> float:
        """One optimizer step; returns the mean loss over ranks, which upstream's loop reduces too."""
        # Upstream sets its reduce-scatter for the whole process whenever a DDP is built.
        param_and_grad_buffer.dist_reduce_scatter_func = self._reduce_scatter
        self.model.zero_grad_buffer()
        self._optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=iter(self._batches),
            model=self.model,
            num_microbatches=len(self._batches),
            seq_length=self._config.sample_length,
            micro_batch_size=self._config.training.micro_batch_size,
            forward_only=False,
        )
        self._optimizer.step()
        loss = torch.stack([part["loss"] for part in losses]).mean()
        dist.all_reduce(loss, group=self._groups.dp_cp)
        return loss.item() / self._groups.dp_cp.size()

    def settle(self) -> None:
        """Wait for all weights, also for those that the next forward would gather."""
        if self.model.ddp_config.overlap_param_gather:
            self.model.disable_forward_pre_hook(param_sync=True)
            self.model.enable_forward_pre_hook()


class DeepSpeedTrainer:
    """DeepSpeed's ZeRO-2 around one of our models, with the states on the host where the device is a GPU.

    Args:
        config: the run.
        groups: the process groups of the job.
        device: the device of this rank.
    """

    def __init__(self, config: RunConfig, groups: ProcessGroupCollection, device: torch.device) -> None:
        import deepspeed  # optional

        self._batches = [batch.to(device) for batch in SameBatches(config, groups.dp.rank()).batches]
        (model,) = build_llama_model(config.model, groups, device, config.execution)
        initialize_weights([model], config.model, config.training.seed)
        optimizer = config.optimizer
        host = {"offload_optimizer": {"device": "cpu", "pin_memory": True}} if device.type == "cuda" else {}
        settings = {
            "train_micro_batch_size_per_gpu": config.training.micro_batch_size,
            "gradient_accumulation_steps": len(self._batches),
            "gradient_clipping": optimizer.clip_grad,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2, "overlap_comm": True, **host},
            "optimizer": {"type": "AdamW", "params": {"lr": optimizer.lr}},
        }
        self._engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=settings, dist_init_required=False
        )

    def step(self) -> float:
        """One optimizer step; returns the mean loss."""
        total = 0.0
        for batch in self._batches:
            losses = self._engine(batch.tokens, None, None, labels=batch.labels)
            loss, _ = masked_mean(losses, mask=batch.loss_mask)
            self._engine.backward(loss)
            self._engine.step()  # updates after the last micro-batch
            total += loss.item()
        return total / len(self._batches)

    def settle(self) -> None:
        """Nothing is under way: its step waits."""


def optimizer_config(config: RunConfig, **further: Any) -> OptimizerConfig:
    """Upstream's settings of a run's optimizer: numbers and switches have the same names there.

    Args:
        config: the run.
        further: settings that it does not say, or other ones.
    """
    own, kept_as = config.optimizer, config.execution.facts.kept_as
    names = {field.name for field in dataclasses.fields(OptimizerConfig)} & {*own.__slots__}
    same = {name: value for name in names if not isinstance(value := getattr(own, name), str)}
    same["use_distributed_optimizer"] = config.zero_stage.shares_states
    return OptimizerConfig(
        optimizer="adam", bf16=kept_as == "bf16", fp16=kept_as == "fp16", **same | further
    )  # fmt: skip


def _settings(config: RunConfig, offload: float) -> OptimizerConfig:
    return optimizer_config(
        config,
        use_distributed_optimizer=True,
        # With it no fp32 masters stay on the GPU; without Transformer Engine upstream does not support it.
        use_precision_aware_optimizer=offload > 0 and find_spec("transformer_engine") is not None,
        optimizer_cpu_offload=offload > 0,
        optimizer_offload_fraction=offload,
        overlap_cpu_optimizer_d2h_h2d=True,
    )


def _forward_step(
    batches: Iterator[Batch], model: torch.nn.Module
) -> tuple[torch.Tensor, partial[tuple[torch.Tensor, dict[str, torch.Tensor]]]]:
    batch = next(batches)
    return model(batch.tokens, None, None, labels=batch.labels), partial(masked_mean, mask=batch.loss_mask)


def masked_mean(losses: torch.Tensor, *, mask: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = (losses * mask).sum() / mask.sum()
    return loss, {"loss": loss.detach().clone()}  # upstream divides the loss in place
