"""Contenders of several benchmarks: our training step, megatron-core's and DeepSpeed's.

megatron-core's DistributedDataParallel and DistributedOptimizer train the same model on the same batches, as
in Megatron-LM's training loop. They get favourable settings:

- our bucket size: with the default of 40 million parameters the small model would be one bucket;
- torch's fused Adam: upstream's own loop is several times slower on a CPU;
- a second contender whose reduce-scatter is an all-to-all: gloo's reduce-scatter moves as many bytes as an
  all-reduce.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import distributed, optimizer, utils
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.optimizer import OptimizerConfig, clip_grads, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection

from patch import compat
from patch.compat import corrections, cpu
from patch.config.choices import PRECISIONS
from patch.config.fields import FIELDS, assemble, coerce
from patch.config.schema import RunConfig
from patch.data import Batch
from patch.device import DeviceContext
from patch.distributed.collectives import max_over_world
from patch.distributed.groups import alone
from patch.model import LlamaModel, build_llama_model, initialize_weights
from patch.training.objectives.objective import Objective
from patch.training.setup import Run, RunData, build_run_optimizer
from patch.training.step import train_step
from toolkits.benchmarks._measure import now

_FIELDS: dict[str, Any] = {
    "rotary_base": 500000.0, "untie_embeddings_and_output_weights": True, "nproc_per_node": 1,
    "micro_batch_size": 1, "global_batch_size": 1, "train_iters": 10**6, "precision": "fp32",
    "lr": 1e-4, "min_lr": 1e-4, "train_data_path": "none", "output_path": "none",
}  # fmt: skip
SHAPE_8B = {
    "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32, "num_query_groups": 8,
    "kv_channels": 128, "vocab_size": 128256,
}  # fmt: skip
"""Shape of LLaMA-3.1 8B without its number of layers."""


def run_config(seq_length: int, **fields: Any) -> RunConfig:
    """Return an fp32 run of a LLaMA: one process, one sequence per step, no data, practically endless.

    Args:
        fields: fields of any section, such as the model's shape. Strings are parsed as on the command line.
    """
    lengths = ("seq_length", "max_position_embeddings", "max_padding_length")
    values = {**_FIELDS, **dict.fromkeys(lengths, seq_length), **fields}
    words = {name: coerce(FIELDS[name], word, name) for name, word in values.items() if isinstance(word, str)}
    return assemble(values | words)


@contextmanager
def one_process() -> Iterator[tuple[DeviceContext, ProcessGroupCollection]]:
    """Context with the device and the groups of one process with one thread, on a GPU if there is one."""
    context = DeviceContext.select(0)
    torch.set_num_threads(1)
    compat.apply(cuda=context.is_cuda)
    with alone(context) as groups:
        yield context, groups


def small_layer(
    width: int, tokens: int, groups: ProcessGroupCollection, device: torch.device, **fields: Any
) -> LlamaModel:
    """Return a model of one layer with heads of 64.

    Args:
        fields: further fields of the run.
    """
    heads = dict.fromkeys(("num_attention_heads", "num_query_groups"), width // 64)
    config = run_config(tokens, num_layers=1, hidden_size=width, kv_channels=64, **heads, **fields)
    (model,) = stages = build_llama_model(config, groups, device)
    initialize_weights(stages, config.model, seed=1)
    return model


class Contender:
    """An implementation that takes optimizer steps."""

    def step(self) -> float:
        """Take one optimizer step; return the loss."""
        raise NotImplementedError

    def settle(self) -> None:
        """Wait for asynchronous work of the last step. Nothing to do if a step ends with its update."""


class SameBatches:
    """Reader that returns the same micro-batches in every step. All tokens have a loss."""

    def __init__(self, config: RunConfig, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        shape = (config.training.micro_batch_size, config.sample_length)

        def words() -> torch.Tensor:
            return torch.randint(config.model.vocab_size, shape, generator=generator)

        self.batches = [Batch(words(), words(), torch.ones(shape)) for _ in range(config.num_micro_batches)]

    def step(self, iteration: int) -> list[Batch]:
        """Return the micro-batches of this rank."""
        return self.batches


class LlamaTrainer(Contender):
    """Trainer of our model; each contender starts with the same weights and the same micro-batches.

    Args:
        change: called with each stage before its optimizer is built.
    """

    def __init__(
        self,
        config: RunConfig,
        groups: ProcessGroupCollection,
        device: torch.device,
        change: Callable[[LlamaModel], None] = lambda stage: None,
    ) -> None:
        self.config, self.groups, self.device = config, groups, device
        self.stages = build_llama_model(config, groups, device)
        initialize_weights(self.stages, config.model, config.training.seed)
        for stage in self.stages:
            change(stage)
        self.reader = SameBatches(config, groups.dp.rank())
        self.batches = [batch.to(device) for batch in self.reader.batches]


class OurTrainer(LlamaTrainer):
    """Step of `patch.training` as in every run, without data loading, checkpoints and logs."""

    def __init__(self, *of_model: Any, **more: Any) -> None:
        super().__init__(*of_model, **more)
        data = RunData(Objective(self.config), self.reader, {})
        optimizer = build_run_optimizer(self.stages, self.config, self.groups)
        self.run = Run(self.config, self.device, self.groups, self.stages, optimizer, data)
        self._iteration = 0

    def step(self) -> float:
        """Take one optimizer step, including the count of the next step's tokens."""
        loss = train_step(self.run, self._iteration).loss
        self._iteration += 1
        return loss

    def settle(self) -> None:
        """Wait for the updated weights."""
        self.run.optimizer.finish_param_sync()


def time_round(
    contender: Contender, steps: int, device: torch.device, untimed: int = 1
) -> tuple[float, float]:
    """Take untimed steps, then `steps` timed steps.

    After the untimed steps the timing is steady. Each timed forward begins while the weights of the previous
    step are still being gathered. The gather of the last step is not timed.

    Args:
        untimed: number of untimed steps.
    Returns:
        seconds per step on the slowest rank, and the last loss.
    """
    for _ in range(untimed):
        contender.step()
    dist.barrier()
    begin = now(device)
    for _ in range(steps):
        loss = contender.step()
    seconds = now(device) - begin
    contender.settle()
    return max_over_world([seconds], device)[0] / steps, loss


_REDUCE_SCATTER = param_and_grad_buffer.dist_reduce_scatter_func
_CUDA_MODULES = (
    "distributed.param_and_grad_buffer", "distributed.distributed_data_parallel", "optimizer.optimizer",
    "optimizer.distrib_optimizer", "optimizer.clip_grads", "optimizer.grad_scaler",
    "transformer.dot_product_attention", "transformer.utils",
)  # fmt: skip
"""Modules of upstream's optimizer and attention that need CUDA beyond what `patch.compat` replaces."""


@cache
def prepare_cpu() -> None:
    """Let upstream's model, DDP and optimizer run without CUDA in this process. Call it after `cpu.apply`."""
    for module in _CUDA_MODULES:
        cpu.replace_torch(f"megatron.core.{module}")
    # Upstream chooses the same without Transformer Engine, whose Adam, norm and scaling need CUDA.
    vars(optimizer).update(Adam=torch.optim.AdamW, USING_PYTORCH_OPTIMIZER=True)
    for module in (clip_grads, optimizer.optimizer):
        vars(module).update(
            multi_tensor_applier=utils.local_multi_tensor_applier,
            l2_norm_impl=utils.local_multi_tensor_l2_norm,
            multi_tensor_scale_impl=utils.local_multi_tensor_scale,
        )
    corrections.define_missing_te_names()
    get_type = torch.Tensor.type

    def type_as_on_cuda(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Upstream compares type names with "torch.cuda.FloatTensor" (distrib_optimizer.py:361, 420, 582)."""
        result = get_type(tensor, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.") if isinstance(result, str) else result

    vars(torch)["Tensor"].type = type_as_on_cuda


class UpstreamTrainer(LlamaTrainer):
    """Upstream's training loop, with the run's optimizer and bucket settings.

    Args:
        of_model, more: see LlamaTrainer.
        overlap: fields of DistributedDataParallelConfig, such as overlap_grad_reduce.
        offload: share of the optimizer states on the CPU (HybridDeviceOptimizer with overlapped copies).
    """

    def __init__(self, *of_model: Any, overlap: Mapping[str, Any], offload: float = 0.0, **more: Any) -> None:
        super().__init__(*of_model, **more)
        config, (model,) = self.config, self.stages
        if self.device.type == "cpu":
            prepare_cpu()
        model.config.calculate_per_token_loss = False  # upstream's default
        param_and_grad_buffer.dist_reduce_scatter_func = _REDUCE_SCATTER
        bucket_size = config.optimizer.reduce_bucket_size
        fields: dict[str, Any] = {"grad_reduce_in_fp32": True, "bucket_size": bucket_size, **overlap}
        settings = distributed.DistributedDataParallelConfig(use_distributed_optimizer=True, **fields)
        self.model = distributed.DistributedDataParallel(model.config, settings, model)
        self._reduce_scatter = param_and_grad_buffer.dist_reduce_scatter_func
        self._optimizer = get_megatron_optimizer(
            _settings(config, offload), [self.model], use_gloo_process_groups=False
        )
        if not offload:  # with offload, upstream sets it itself
            for group in self._optimizer.param_groups:
                group["fused"] = True
        model.config.no_sync_func = self.model.no_sync
        model.config.grad_scale_func = self._optimizer.scale_loss
        model.config.finalize_model_grads_func = distributed.finalize_model_grads

    def step(self) -> float:
        """Take one optimizer step; return the mean loss over ranks, which upstream's loop reduces too."""
        # Upstream sets its reduce-scatter for the whole process whenever a DDP is built.
        param_and_grad_buffer.dist_reduce_scatter_func = self._reduce_scatter
        self.model.zero_grad_buffer()
        self._optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=_forward_step, data_iterator=iter(self.batches), model=self.model,
            num_microbatches=len(self.batches), seq_length=self.config.sample_length,
            micro_batch_size=self.config.training.micro_batch_size, forward_only=False,
        )  # fmt: skip
        self._optimizer.step()
        loss = torch.stack([part["loss"] for part in losses]).mean()
        dist.all_reduce(loss, group=self.groups.dp_cp)
        return loss.item() / self.groups.dp_cp.size()

    def settle(self) -> None:
        """Wait for all weights, including the weights that the next forward would gather."""
        if self.model.ddp_config.overlap_param_gather:
            self.model.disable_forward_pre_hook(param_sync=True)
            self.model.enable_forward_pre_hook()


class DeepSpeedTrainer(LlamaTrainer):
    """DeepSpeed's ZeRO-2 with the optimizer states on the host."""

    def __init__(self, *of_model: Any, **more: Any) -> None:
        import deepspeed  # optional

        super().__init__(*of_model, **more)
        config, (model,) = self.config, self.stages
        on_host = {"device": "cpu", "pin_memory": True}
        settings = {
            "train_micro_batch_size_per_gpu": config.training.micro_batch_size,
            "gradient_accumulation_steps": len(self.batches),
            "gradient_clipping": config.optimizer.clip_grad,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": on_host},
            "optimizer": {"type": "AdamW", "params": {"lr": config.optimizer.lr}},
        }
        self._engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=settings, dist_init_required=False
        )

    def step(self) -> float:
        """Take one optimizer step; return the mean loss."""
        total = 0.0
        for batch in self.batches:
            losses = self._engine(batch.tokens, None, None, labels=batch.labels)
            loss, _ = masked_mean(losses, mask=batch.loss_mask)
            self._engine.backward(loss)
            self._engine.step()  # updates only after the last micro-batch
            total += loss.item()
        return total / len(self.batches)


def _settings(config: RunConfig, offload: float) -> OptimizerConfig:
    """Return upstream's settings of the run's optimizer. Numbers and switches have the same names there."""
    own, kept_as = config.optimizer, PRECISIONS[config.training.precision].kept_as
    names = {field.name for field in dataclasses.fields(OptimizerConfig)} & {*own.__slots__}
    same = {name: value for name in names if not isinstance(value := getattr(own, name), str)}
    further = dict(
        optimizer="adam", bf16=kept_as == "bf16", fp16=kept_as == "fp16", use_distributed_optimizer=True,
        # With this flag no fp32 masters stay on the GPU. Upstream supports it only with Transformer Engine.
        use_precision_aware_optimizer=offload > 0 and find_spec("transformer_engine") is not None,
        optimizer_cpu_offload=offload > 0, optimizer_offload_fraction=offload,
        overlap_cpu_optimizer_d2h_h2d=True,
    )  # fmt: skip
    return OptimizerConfig(**same | further)


def _forward_step(
    batches: Iterator[Batch], model: torch.nn.Module
) -> tuple[torch.Tensor, partial[tuple[torch.Tensor, dict[str, torch.Tensor]]]]:
    batch = next(batches)
    return model(batch.tokens, None, None, labels=batch.labels), partial(masked_mean, mask=batch.loss_mask)


def masked_mean(losses: torch.Tensor, *, mask: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = (losses * mask).sum() / mask.sum()
    return loss, {"loss": loss.detach().clone()}  # upstream divides the loss in place
