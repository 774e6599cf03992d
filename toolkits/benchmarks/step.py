"""Measure a training step on CPUs beside the plain loop of a user: transformers' model and DDP.

    python -m toolkits.benchmarks step [--quick] [--only fp32,1,1] [--model bloom] [--lora 16] [--dpo]

With --lora both train adapters, the plain loop those of PEFT. Two more of our runs train all weights, and
adapters on an nf4 base. The bytes of a rank are compared with the plan. With --dpo both learn from pairs in
fp32, and TRL's `DPOTrainer` takes the place of the plain loop. Both have computed their reference before.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, PreTrainedTokenizerFast

from patch.config.choices import Precision
from patch.config.schema import RunConfig
from patch.convert import iter_hf_weights
from patch.convert.hf_config_files import transformers_family
from patch.data import BatchReader, load_sft
from patch.data.packing import PairSource
from patch.device import DeviceContext, MachineFacts, usable_cores
from patch.distributed.collectives import sum_over
from patch.distributed.groups import initialize
from patch.families.adapters import PEFT_PREFIX, AdapterConfig
from patch.families.shape import SHAPE_FIELDS
from patch.plan.memory import bytes_per_rank
from patch.training.objectives.preference import Preference
from patch.training.setup import Run
from toolkits.benchmarks._contenders import Contender, OurTrainer, run_config, time_round
from toolkits.benchmarks._measure import dearest_kernels, run_ranks, take_turns
from toolkits.benchmarks._report import Aim, NotRunError, Report, Rounds, ratio

_STEPS, _BATCH, _TIMEOUT_S = 4, 4, 900
_AIMS = {"llama": 0.95, "bloom": 1.0, "mixtral": 1.0}
_LOSS_BOUND = {"fp32": 1e-4, "bf16": 2e-2}
OURS, PLAIN = "the main job", "a plain loop"
ALL, NF4_BASE = "all weights", "a base in 4 bits"
"""With --lora, contenders beside the main job."""
_SHAPE = {
    "num_layers": 8, "hidden_size": 512, "ffn_hidden_size": 1408, "num_attention_heads": 8,
    "num_query_groups": 8, "kv_channels": 64, "vocab_size": 8192,
}  # fmt: skip
_MODELS: dict[str, dict[str, Any]] = {
    "llama": _SHAPE,
    "bloom": {**_SHAPE, "model_type": "bloom", "ffn_hidden_size": 2048, "rotary_base": 1e4,
              "untie_embeddings_and_output_weights": False},
    "mixtral": {**_SHAPE, "model_type": "mixtral", "num_layers": 4, "ffn_hidden_size": 704, "num_experts": 8},
}  # fmt: skip
ROUNDS = (9, 3)
OPTIONS: dict[str, dict[str, Any]] = {
    "--only": {"help": "one case: precision,processes,accumulation, as fp32,2,4"},
    "--model": {"help": "the family of the model", "choices": [*_MODELS], "default": "llama"},
    "--lora": {"help": "rank of adapters; 0: all weights train", "type": int, "default": 0},
    "--dpo": {"help": "preferred answers, beside TRL", "action": "store_true"},
}


def run(arguments: argparse.Namespace) -> Report:
    """Measure and report."""
    found: dict[str, Any] = {}
    aims: list[Aim] = []
    if arguments.lora and find_spec("peft") is None:
        raise NotRunError("needs peft, of the extra `test`")
    if arguments.dpo and find_spec("trl") is None:
        raise NotRunError("needs trl with what it imports, see .ci/run")
    for precision, num_ranks, accumulation in _cases("fp32,1,1" if arguments.dpo else arguments.only):
        name = f"{precision}, {num_ranks} process{'es'[: 2 * (num_ranks > 1)]}, accumulation {accumulation}"
        threads = max(1, min(2, usable_cores()) // num_ranks)
        found[name] = run_ranks(
            measure, num_ranks, _TIMEOUT_S, threads=threads, rounds=arguments.rounds,
            steps=max(1, _STEPS // accumulation), model=arguments.model, precision=precision,
            accumulation=accumulation, lora=arguments.lora, dpo=arguments.dpo,
        )  # fmt: skip
        losses, rounds = found[name]["losses"], found[name]["rounds"]
        print(Rounds(rounds).table(name, PLAIN, {"loss": lambda contender: f"{losses[contender]:.5f}"}))  # noqa: B023
        for contender, kernels in found[name]["kernels"].items():
            print(f"{contender}, one step:\n\n{kernels}", flush=True)
        if abs(losses[OURS] - losses[PLAIN]) > _LOSS_BOUND[precision] * losses[PLAIN]:
            sys.exit(f"FAILED: losses {losses}, expected equal ones")
        most = 0.95 if arguments.lora or arguments.dpo else _AIMS[arguments.model]
        aims.append(Aim(f"{name}: {OURS} / {PLAIN}", ratio(rounds[OURS], rounds[PLAIN]), most))
        if arguments.lora and not arguments.dpo:
            aims += _aims_of_adapters(name, **found[name])
    return Report("", aims, {"measured": found})


def _aims_of_adapters(name: str, bytes: dict[str, Any], rounds: dict[str, Any], **more: Any) -> list[Aim]:
    """Return the aims: bytes of each of our runs / planned, and its time / time of training all weights."""
    aims = [
        Aim(f"{name}: {of}, {what} / planned", measured / planned, 1.01)
        for what, held in bytes.items()
        for of, (measured, planned) in held.items()
    ]
    times = {one: ratio(rounds[one], rounds[ALL]) for one in (OURS, NF4_BASE)}
    return aims + [Aim(f"{name}: {one} / {ALL}", time, 1.0) for one, time in times.items()]


def _cases(only: str | None) -> list[tuple[str, int, int]]:
    if only:
        precision, num_ranks, accumulation = only.split(",")
        return [(precision, int(num_ranks), int(accumulation))]
    precisions = ("fp32", "bf16") if MachineFacts.probe().multiplies_16_bits else ("fp32",)
    return [(precision, ranks, n) for precision in precisions for ranks in (1, 2) for n in (1, 4)]


class PlainLoop(Contender):
    """A user's loop without this project: transformers' model, torch's fused AdamW, clipping and DDP.

    Args:
        run: source of the initial weights and of the micro-batches.
    """

    def __init__(self, run: Run) -> None:
        self.model = _transformers_model(run)
        is_alone = dist.get_world_size() == 1
        self._forward: Any = self.model if is_alone else DistributedDataParallel(self.model)
        settings = run.config.optimizer
        trained = [p for p in self.model.parameters() if p.requires_grad]
        norms = [p for p in trained if p.ndim == 1]
        matrices = [p for p in trained if p.ndim > 1]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": norms, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(
            groups, lr=settings.lr, betas=(settings.adam_beta1, settings.adam_beta2), eps=settings.adam_eps,
            weight_decay=settings.weight_decay, fused=True,
        )  # fmt: skip
        self._clip, self._batches = settings.clip_grad, run.data.train_reader.step(0)
        self._is_bf16 = run.config.training.precision == "bf16"

    def step(self) -> float:
        """Take one optimizer step; return this rank's loss."""
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


def _transformers_model(run: Run) -> torch.nn.Module:
    model, described = run.config.model, dict[str, Any]()
    family = transformers_family(model)
    family.write_type(described, model)
    family.write_shape(described, model, SHAPE_FIELDS)
    config = AutoConfig.for_model(**described)
    weights = {name: weight.float() for name, weight in iter_hf_weights(run.stages, model, run.groups)}
    known: dict[str, Any] = {"config": config, "state_dict": weights, "dtype": torch.float32}
    built = getattr(transformers, described["architectures"][0]).from_pretrained(None, **known).train()
    return _with_adapters(built, run) if run.config.adapter.lora_rank else built


def _with_adapters(model: torch.nn.Module, run: Run) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    adapter = run.config.adapter
    rank: Any = adapter.lora_rank
    found = get_peft_model(model, LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear"))
    factors = iter_hf_weights(run.stages, run.config.model, run.groups, adapter=adapter)
    set_peft_model_state_dict(found, {PEFT_PREFIX + name: values.float() for name, values in factors})
    return found


class DpoTrainer(Contender):
    """A step of TRL's `DPOTrainer` with torch's fused AdamW and clipping, without the rest of TRL's loop.

    As with ours, the reference is computed before (`precompute_ref_log_probs`). The batch is collated before.
    All sequences have one length: neither side has padding, and the gain of packing is not measured.

    Args:
        model: the trained model, of transformers or PEFT.
    """

    def __init__(self, model: torch.nn.Module, config: RunConfig) -> None:
        from datasets import Dataset
        from trl import DPOConfig, DPOTrainer

        settings, size = config.optimizer, config.training.global_batch_size
        vocabulary = {str(number): number for number in range(2, config.model.vocab_size)}
        words = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, **vocabulary}, unk_token="<pad>"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="<pad>")
        arguments = DPOConfig(
            mkdtemp(), beta=config.training.dpo_beta, max_length=None, use_cpu=True, bf16=False,
            precompute_ref_log_probs=True, gradient_checkpointing=False, learning_rate=settings.lr,
            adam_beta1=settings.adam_beta1, adam_beta2=settings.adam_beta2, adam_epsilon=settings.adam_eps,
            weight_decay=settings.weight_decay, per_device_train_batch_size=size, report_to=[],
            disable_tqdm=True, optim="adamw_torch_fused",
        )  # fmt: skip
        self.rows = _rows(size, config.sample_length // 4, config.model.vocab_size)
        own: Any = {"train_dataset": Dataset.from_list(self.rows), "processing_class": self.tokenizer}
        self._trainer: Any = DPOTrainer(model, args=arguments, **own)
        self._trainer.current_gradient_accumulation_steps = 1
        self._optimizer = self._trainer.create_optimizer()
        self._batch = self._trainer.data_collator(list(self._trainer.train_dataset))
        self._clip = settings.clip_grad

    def step(self) -> float:
        """Take one optimizer step; return the loss."""
        loss = self._trainer.training_step(self._trainer.model, self._batch)
        torch.nn.utils.clip_grad_norm_(self._trainer.model.parameters(), self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()


def beside_trl(run: Run, model: torch.nn.Module) -> DpoTrainer:
    """Return TRL's trainer, and give its rows to the run.

    Args:
        run: our run; the rows are written to its output folder.
        model: model of transformers or PEFT with the run's weights.
    """
    config, theirs = run.config, DpoTrainer(model, run.config)
    file = Path(config.checkpoint.output_path, "pairs.json")
    file.write_text(json.dumps(theirs.rows), encoding="utf-8")
    pairs = load_sft(file, theirs.tokenizer, config.sample_length, row_kind="pair")
    source = PairSource(pairs, config.sample_length, is_packed=False)
    run.data.objective = objective = Preference(config)
    objective.sets = [source]
    run.data.train_reader = BatchReader(
        source, micro_batch_size=config.training.micro_batch_size,
        global_batch_size=config.training.global_batch_size, dp_rank=0, dp_size=1, seed=0, shuffle=True,
        make_batch=objective.collate,
    )  # fmt: skip
    objective.prepare(run)
    return theirs


def _rows(number: int, length: int, vocab_size: int) -> list[dict[str, str]]:
    """Return pairs of random words, `length` per prompt and per answer. The end token is only a label."""
    draw, keys = np.random.default_rng(0), ("prompt", "chosen", "rejected")

    def text() -> str:
        return "".join(f"{word} " for word in draw.integers(2, vocab_size, length))

    return [{key: text() for key in keys} for _ in range(number)]


def _held(run: Run) -> dict[str, tuple[int, int]]:
    """Return kind -> bytes of this rank, planned bytes."""
    report, planned = run.optimizer.report(), bytes_per_rank(run.config)
    weights = sum(parameter.nbytes for stage in run.stages for parameter in stage.parameters())
    return {
        "weights": (weights, planned.weights),
        "gradients": (run.optimizer.grad_buffer.num_bytes, planned.gradients),
        "states": (report.host_bytes + report.device_bytes, planned.optimizer),
    }


def measure(context: DeviceContext, rounds: int, steps: int, **case: Any) -> dict[str, Any]:
    """Return seconds per step by round, losses, bytes, and the slowest operators of one more step.

    Args:
        steps: timed steps per round.
        case: arguments of `_trainers`.
    """
    ours = _trainers(context, **case)
    run = ours[OURS].run
    is_dpo = run.config.training.objective == "dpo"
    plain = beside_trl(run, _transformers_model(run)) if is_dpo else PlainLoop(run)
    contenders: dict[str, Contender] = {**ours, PLAIN: plain}
    found = take_turns(
        {name: partial(time_round, one, steps, context.device) for name, one in contenders.items()}, rounds
    )
    # Losses of the first round: later, the contenders may route a token to different, nearly equal experts.
    losses = {name: timed[0][1] for name, timed in found.items()}
    losses[PLAIN] = sum_over(run.groups.dp, [losses[PLAIN]], context.device)[0] / dist.get_world_size()
    return {
        "rounds": {name: [seconds for seconds, _ in timed] for name, timed in found.items()},
        "losses": losses,
        "bytes": {name: _held(one.run) for name, one in ours.items()},
        "kernels": {name: dearest_kernels(one.step, context.device) for name, one in contenders.items()},
    }


def _trainers(
    context: DeviceContext, model: str, precision: Precision, accumulation: int, lora: int, dpo: bool
) -> dict[str, OurTrainer]:
    """Return our runs. In bf16 ours has bf16 weights with fp32 masters, the plain loop fp32 with autocast."""
    num_ranks = dist.get_world_size()
    of_pairs = {"objective": "dpo", "output_path": mkdtemp(), "cache_dir": mkdtemp()} if dpo else {}
    config = run_config(
        512 if dpo else 256, **_MODELS[model], nproc_per_node=num_ranks,
        use_distributed_optimizer=num_ranks > 1, micro_batch_size=_BATCH,
        global_batch_size=_BATCH * num_ranks * accumulation, precision=precision, lora_rank=lora or None,
        **of_pairs,
    )  # fmt: skip
    groups = initialize(config, context)
    adapters = {OURS: config.adapter}
    if lora and not dpo:
        nf4 = dataclasses.replace(config.adapter, quantize_base="nf4")
        adapters |= {ALL: AdapterConfig(), NF4_BASE: nf4}
    return {
        name: OurTrainer(dataclasses.replace(config, adapter=each), groups, context.device)
        for name, each in adapters.items()
    }
