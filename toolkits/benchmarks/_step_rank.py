"""One rank of `step`: our step and a plain loop of transformers, same weights and batches, in turns."""

from __future__ import annotations

import statistics
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from patch.config.schema import ParallelConfig, RunConfig
from patch.convert import iter_hf_weights
from patch.data import Batch
from patch.device import DeviceContext
from patch.distributed.groups import initialize
from toolkits.benchmarks._contenders import Contender, OurTrainer, SameBatches, time_round
from toolkits.benchmarks._gpu_step_run import dearest_kernels
from toolkits.benchmarks._rank import run_as_rank, slowest
from toolkits.benchmarks._run_config import llama, run_config

OURS, PLAIN = "the main job", "a plain loop"
_MODEL = llama(
    256, num_layers=8, hidden_size=512, ffn_hidden_size=1408, num_attention_heads=8, num_query_groups=8,
    kv_channels=64, vocab_size=8192,
)  # fmt: skip
_BATCH = 4


@dataclass(frozen=True, kw_only=True)
class Task:
    """The work of one rank."""

    precision: str
    """fp32 or bf16: ours has bf16 weights with fp32 master weights, the plain loop fp32 with autocast."""
    accumulation: int
    """Micro-batches of a step."""
    threads: int
    """Threads of each process."""
    rounds: int
    steps: int
    """Timed steps of a round."""


class PlainLoop:
    """What a user writes without us: transformers' model, torch's fused AdamW and clipping, and its DDP.

    Args:
        ours: gives the first weights.
        batches: micro-batches of a step.
    """

    num_buckets = 0

    def __init__(self, ours: OurTrainer, batches: list[Batch]) -> None:
        run = ours.run
        self.model = _transformers_model(run.config)
        self.model.load_state_dict(dict(iter_hf_weights(run.stages, run.config.model, run.groups)))
        is_alone = dist.get_world_size() == 1
        self._forward: Any = self.model if is_alone else DistributedDataParallel(self.model)
        settings = run.config.optimizer
        norms = [p for p in self.model.parameters() if p.ndim == 1]
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": norms, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(
            groups, lr=settings.lr, betas=(settings.adam_beta1, settings.adam_beta2), eps=settings.adam_eps,
            weight_decay=settings.weight_decay, fused=True,
        )  # fmt: skip
        self._clip, self._batches = settings.clip_grad, batches
        self._is_bf16 = run.config.training.precision == "bf16"

    def step(self) -> float:
        """One optimizer step; this rank's loss."""
        total = 0.0
        for batch in self._batches:
            is_last = batch is self._batches[-1]
            with nullcontext() if is_last or self._forward is self.model else self._forward.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=self._is_bf16):
                    labels = {"labels": batch.labels, "shift_labels": batch.labels}
                    out = self._forward(input_ids=batch.tokens, use_cache=False, **labels)
                loss = out.loss / len(self._batches)
                loss.backward()
                total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total

    def settle(self) -> None:
        """Nothing to do: nothing is under way after a step."""


def _transformers_model(config: RunConfig) -> LlamaForCausalLM:
    model = config.model
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=model.vocab_size, hidden_size=model.hidden_size,
            intermediate_size=model.ffn_hidden_size, num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_attention_heads,
            num_key_value_heads=model.num_query_groups, head_dim=model.kv_channels,
            rms_norm_eps=model.norm_epsilon, max_position_embeddings=model.max_position_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": model.rotary_base},
            tie_word_embeddings=not model.untie_embeddings_and_output_weights,
        )
    )  # fmt: skip


def measure(task: Task, context: DeviceContext) -> dict[str, Any]:
    """Seconds of a step and losses of each round, and the dearest operators of one step more."""
    torch.set_num_threads(task.threads)
    num_ranks = dist.get_world_size()
    config = run_config(
        _MODEL, ParallelConfig(nproc_per_node=num_ranks, use_distributed_optimizer=num_ranks > 1),
        micro_batch_size=_BATCH, global_batch_size=_BATCH * num_ranks * task.accumulation,
        precision=task.precision,
    )  # fmt: skip
    groups = initialize(config, context)
    reader = SameBatches(config, groups.dp_cp.rank())
    ours = OurTrainer(config, groups, context.device, reader)
    contenders: dict[str, Contender] = {OURS: ours, PLAIN: PlainLoop(ours, reader.batches)}
    rounds: dict[str, list[float]] = {name: [] for name in contenders}
    losses: dict[str, float] = {}
    for turn in range(task.rounds):
        for name in list(contenders)[:: -1 if turn % 2 else 1]:
            seconds, loss = time_round(contenders[name], task.steps, context.device)
            rounds[name].append(slowest(seconds, context.device))
            losses[name] = loss if name == OURS else _mean_over_ranks(loss)
    kernels = {name: dearest_kernels(one.step, context.device) for name, one in contenders.items()}
    return {"rounds": rounds, "losses": losses, "kernels": kernels}


def _mean_over_ranks(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def ratio(rounds: dict[str, list[float]]) -> float:
    """The median over rounds of ours / plain."""
    return statistics.median(a / b for a, b in zip(rounds[OURS], rounds[PLAIN], strict=True))


if __name__ == "__main__":
    run_as_rank(Task, measure, on_cpu=True)
