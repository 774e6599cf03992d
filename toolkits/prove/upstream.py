"""A run of megatron-core's own model and optimizer, which leaves the evidence that `worker.py` keeps of ours.

torchrun starts it on each rank, with the file of a resolved run. Weights, rows and their order are this
project's (`build_run`); layers (its local spec), products, messages, schedule, sums of gradients, norm,
clipping, loss scale and masters are upstream's, without a correction of `patch.compat`. On a CPU its Adam is
torch's AdamW, upstream's own choice where Transformer Engine is not installed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from megatron.core import distributed, optimizer, parallel_state, utils
from megatron.core.extensions import transformer_engine
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, clip_grads
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

if __name__ == "__main__":  # a worker has no other way to the packages
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from patch.checkpoint import save_checkpoint  # noqa: E402
from patch.checks.layout import ACCOUNTED  # noqa: E402
from patch.checks.run_length import place_in_schedule  # noqa: E402
from patch.compat import cpu  # noqa: E402
from patch.config import RunConfig, read_run  # noqa: E402
from patch.data import Batch  # noqa: E402
from patch.device import DeviceContext  # noqa: E402
from patch.distributed.collectives import all_gather_object, max_over_world, sum_over  # noqa: E402
from patch.distributed.groups import initialize, shutdown  # noqa: E402
from patch.families import traits_of  # noqa: E402
from patch.model import PackedSequences, initialize_weights, sharded_weights  # noqa: E402
from patch.model.configuration import transformer_config  # noqa: E402
from patch.optimizer import ParamGroup, learning_rate  # noqa: E402
from patch.optimizer.sharded_state import StateRange, sharded_ranges  # noqa: E402
from patch.storage.names import CHECKPOINT_FOLDER, METRICS_FILE  # noqa: E402
from patch.training.evaluation import evaluate  # noqa: E402
from patch.training.guards.phases import PhaseClock  # noqa: E402
from patch.training.objective import Objective  # noqa: E402
from patch.training.setup import Run, build_run  # noqa: E402
from patch.training.step import run_schedule  # noqa: E402
from patch.training.step_data import take_work  # noqa: E402
from toolkits.prove.worker import EVIDENCE, GRADIENTS, TokenCounter  # noqa: E402

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
_STATES = {
    "param": "weight", "exp_avg": "optimizer.state.exp_avg", "exp_avg_sq": "optimizer.state.exp_avg_sq",
}  # fmt: skip
"""What upstream calls a master and its moments, and what a checkpoint does."""


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


class Upstream(GPTModel):
    """Upstream's model but for one step: it copies a tied embedding to the last stage on a GPU."""

    def _is_in_embd_group(self) -> bool:
        return False


def upstream_stage(
    config: RunConfig,
    groups: ProcessGroupCollection,
    vp_stage: int,
    spec: TransformerBlockSubmodules | None = None,
) -> Upstream:
    """Upstream's model of a stage, initialised by itself, which is where it sets its marks.

    Args:
        config: the run.
        groups: the process groups of this rank.
        vp_stage: the index of this stage among the stages of its process.
        spec: its layers; None: those of upstream's local spec.
    """
    model = config.model
    upstream = dataclasses.replace(
        transformer_config(model, groups, config.execution, cuda=False), perform_initialization=True,
        init_method_std=model.init_method_std, init_method=None, output_layer_init_method=None,
        embedding_init_method=None, embedding_init_method_std=None,
    )  # fmt: skip
    _let_upstream_cut(upstream, config)
    stage = vp_stage * groups.pp.size() + groups.pp.rank()
    spec = spec or get_gpt_decoder_block_spec(
        upstream, use_transformer_engine=False, normalization=traits_of(model).normalization,
        vp_stage=vp_stage, pp_rank=groups.pp.rank(),
    )  # fmt: skip
    return Upstream(
        config=upstream,
        transformer_layer_spec=spec,
        vocab_size=config.padded_vocab_size,
        max_sequence_length=model.max_position_embeddings,
        pre_process=stage == 0,
        post_process=stage == config.virtual_pipeline_size * groups.pp.size() - 1,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_base=model.rotary_base,
        rope_scaling=model.use_rope_scaling,
        rope_scaling_factor=model.rope_scaling_factor,
        pg_collection=groups,
        vp_stage=vp_stage,
    )


def _let_upstream_cut(upstream: TransformerConfig, config: RunConfig) -> None:
    """Give upstream its own flags for what it cuts by itself; interleaved layouts need its global state."""
    parallel, pp_size = config.parallel, config.parallel.pipeline_model_parallel_size
    parallel_state.set_virtual_pipeline_model_parallel_world_size(
        upstream.virtual_pipeline_model_parallel_size
    )
    if parallel.pipeline_model_parallel_layout is not None:
        upstream.pipeline_model_parallel_layout = PipelineParallelLayerLayout(
            parallel.pipeline_model_parallel_layout, pp_size
        )
    elif parallel.account_for_loss_in_pipeline_split:
        upstream.pipeline_model_parallel_layout = None
        for field in ACCOUNTED:
            setattr(upstream, field, True)


class _TokenLosses(Objective):
    """The sum of tokens' losses, as Megatron-LM's programs give it to the schedule."""

    def forward(
        self, model: torch.nn.Module, batch: Batch, packed: PackedSequences | None, gradient: float
    ) -> torch.Tensor:
        """Upstream's output; packed sequences are kept apart by a mask, because RoPE is relative."""
        mask = None
        if batch.cu_seqlens is not None:
            lengths = batch.cu_seqlens.diff()
            numbers = torch.arange(len(lengths)).repeat_interleave(lengths).view(batch.tokens.shape)
            later = torch.ones(2 * numbers.shape[1:], dtype=torch.bool).triu(1)
            mask = (numbers[:, None, :, None] != numbers[:, None, None]) | later
        losses: torch.Tensor = model(batch.tokens, None, mask, labels=batch.labels)
        return losses

    def report(self, output: torch.Tensor, batch: Batch, divisor: float) -> Mapping[str, torch.Tensor]:
        """The sum, of the learned tokens."""
        return {"loss": (output * batch.loss_mask).sum() / divisor}


class UpstreamRun:
    """Upstream's model and optimizer of a run.

    Args:
        run: ours, whose data it reads and whose stages it replaces.
    """

    def __init__(self, run: Run) -> None:
        config, groups = run.config, run.groups
        self._run, self._output = run, Path(config.checkpoint.output_path)
        stages = [upstream_stage(config, groups, number) for number in range(config.virtual_pipeline_size)]
        self._stages: list[Any] = [stage.to(stage.config.params_dtype) for stage in stages]
        with torch.no_grad():
            initialize_weights(self._stages, config.model, config.training.seed)
        settings = distributed.DistributedDataParallelConfig(
            grad_reduce_in_fp32=config.optimizer.main_grads_dtype == "fp32",
            use_distributed_optimizer=config.zero_stage.shares_states,
        )
        wrapped: list[Any] = [
            distributed.DistributedDataParallel(stage.config, settings, stage, disable_bucketing=number > 0)
            for number, stage in enumerate(self._stages)
        ]
        self._optimizer: Any = optimizer.get_megatron_optimizer(
            optimizer_config(config), wrapped, use_gloo_process_groups=False
        )
        for stage in wrapped:
            stage.config.grad_scale_func = self._optimizer.scale_loss
            stage.config.finalize_model_grads_func = distributed.finalize_model_grads
            stage.activation_offload = stage.step_weights = None
        run.stages, run.data.objective = wrapped, _TokenLosses(config)
        self._tokens = run.data.train_reader = TokenCounter(run.data.train_reader)

    def train(self) -> None:
        """All steps and the evaluation; the evidence of each is written."""
        run, records, steps = self._run, list[dict[str, float]](), dict[int, Any]()
        for iteration in range(run.config.training.train_iters):
            records.append({"iteration": iteration + 1, **self._step(iteration)})
            seen = all_gather_object(self._tokens.seen[iteration + 1])
            steps[iteration + 1] = {"tokens": [sum(each) for each in zip(*seen, strict=True)], "unequal": []}
        records.append({"iteration": run.config.training.train_iters, **evaluate(run)})
        if torch.distributed.get_rank() == 0:
            (self._output / METRICS_FILE).parent.mkdir(parents=True, exist_ok=True)
            (self._output / METRICS_FILE).write_text("".join(json.dumps(each) + "\n" for each in records))
            (self._output / EVIDENCE).write_text(json.dumps(steps), encoding="utf-8")

    def _step(self, iteration: int) -> dict[str, float]:
        """One step, in the order of Megatron-LM's `train_step`."""
        run, upstreams = self._run, self._optimizer
        for stage in run.stages:
            stage.zero_grad_buffer()  # type: ignore[operator]
        upstreams.zero_grad()
        work = take_work(run, iteration)
        reports = run_schedule(run, work.batches, 1.0, loss_scale=1.0)
        total = float(sum(report["loss"] for report in reports)) if reports else -math.inf
        gradients = [
            part._replace(values=part.parameter.main_grad.view(-1)[part.first :][: part.values.numel()])
            for part, _ in self._parts()
        ]
        self._save(GRADIENTS, iteration + 1, {"gradient": gradients})  # clipping changes them
        place, rate = place_in_schedule(run.config, iteration), run.config.optimizer
        for group in upstreams.param_groups:  # the part of its OptimizerParamScheduler
            group["weight_decay"] = group["wd_mult"] * rate.weight_decay
            ends = ParamGroup([], 0.0, max_lr=group["max_lr"], min_lr=group["min_lr"])
            group["lr"] = learning_rate(*place, rate, ends)
        _, norm, _ = upstreams.step()
        states = {
            prefix: [part._replace(values=own[name].view(-1)) for part, own in self._parts()]
            for name, prefix in _STATES.items()
        }
        self._save(CHECKPOINT_FOLDER, iteration + 1, states)
        (summed,) = max_over_world(sum_over(run.groups.dp_cp, [total], run.device), run.device)
        return {"loss": summed / work.divisor, "grad_norm": float(norm), "lr": learning_rate(*place, rate)}

    def _parts(self) -> Iterator[tuple[Any, dict[str, torch.Tensor]]]:
        """This rank's StateRange of each master, and the states there; moments after a step only."""
        found: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for each in self._optimizer.chained_optimizers:
            if not isinstance(each, DistributedOptimizer):
                found |= each.optimizer.state
                continue
            for parameter in each.model_param_gbuf_map:
                first = each._get_model_param_range_map(parameter)["param"].start
                states = each._get_main_param_and_optimizer_states(parameter)
                yield StateRange(parameter, first, states["param"], 0), states
        if not self._run.config.zero_stage.shares_states:
            for parameter in chain.from_iterable(stage.parameters() for stage in self._stages):
                groups, main = self._run.groups, getattr(parameter, "main_param", parameter)
                holders = groups.dp_cp if getattr(parameter, "allreduce", True) else groups.expt_dp
                yield StateRange(parameter, 0, main, holders.rank()), {"param": main, **found.get(main, {})}

    def _save(self, name: str, step: int, states: Mapping[str, Sequence[StateRange]]) -> None:
        weights = sharded_weights(self._stages)
        state = {prefix: sharded_ranges(weights, ranges, f"{prefix}.") for prefix, ranges in states.items()}
        save_checkpoint(self._output / name, step, state, {})


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


def main(file: str) -> None:
    """Run on this rank."""
    config = read_run(Path(file))
    context = DeviceContext.select(int(os.environ["LOCAL_RANK"]))
    cpu.apply()
    prepare_cpu()
    groups = initialize(config, context)
    UpstreamRun(build_run(config, context, groups, PhaseClock())).train()
    shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
