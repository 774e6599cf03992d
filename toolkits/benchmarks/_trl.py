"""TRL's trainer of preferences as a contender, and its rows as ours: pairs of two answers to a prompt.

All sequences have one length, so that neither side has padding: what packing gains is not measured.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from patch.config.schema import RunConfig
from patch.data import BatchReader
from patch.data.packing import PairSource
from patch.training.preference import Preference
from patch.training.setup import Run


class DpoTrainer:
    """A step of TRL's `DPOTrainer` with torch's fused AdamW and clipping, and with nothing of its loop.

    The reference is computed before (`precompute_ref_log_probs`), as ours; the batch is collated before.

    Args:
        model: of transformers or PEFT; it is trained.
        config: the run.
    """

    def __init__(self, model: torch.nn.Module, config: RunConfig) -> None:
        from datasets import Dataset
        from trl import DPOConfig, DPOTrainer

        settings, size = config.optimizer, config.training.global_batch_size
        vocabulary = {str(number): number for number in range(2, config.model.vocab_size)}
        words = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, **vocabulary}, unk_token="<pad>"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="<pad>")
        arguments = DPOConfig(
            tempfile.mkdtemp(), beta=config.training.dpo_beta, max_length=None, use_cpu=True, bf16=False,
            precompute_ref_log_probs=True, gradient_checkpointing=False, learning_rate=settings.lr,
            adam_beta1=settings.adam_beta1, adam_beta2=settings.adam_beta2, adam_epsilon=settings.adam_eps,
            weight_decay=settings.weight_decay, per_device_train_batch_size=size, report_to=[],
            disable_tqdm=True, optim="adamw_torch_fused",
        )  # fmt: skip
        data = Dataset.from_list(_rows(size, config.sample_length // 4, config.model.vocab_size))
        own: Any = {"train_dataset": data, "processing_class": tokenizer}
        self._trainer: Any = DPOTrainer(model, args=arguments, **own)
        self._trainer.current_gradient_accumulation_steps = 1
        self._optimizer = self._trainer.create_optimizer()
        self.rows = list(self._trainer.train_dataset)
        self._batch, self._clip = self._trainer.data_collator(self.rows), settings.clip_grad

    def step(self) -> float:
        """One optimizer step; the loss."""
        loss = self._trainer.training_step(self._trainer.model, self._batch)
        torch.nn.utils.clip_grad_norm_(self._trainer.model.parameters(), self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()

    def settle(self) -> None:
        """Do nothing: a step ends with its update."""


class SamePairs:
    """The sequences of TRL's rows, with its tokens and masks, as ours (see `Conversations`).

    Args:
        rows: of `DpoTrainer`.
    """

    padding, fingerprint = 0, "pairs of TRL"

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        answers = [
            (row["prompt_ids"], row[f"{which}_ids"]) for row in rows for which in ("chosen", "rejected")
        ]
        self._ids = [np.array([*prompt, *answer], np.int32) for prompt, answer in answers]
        self._begins = [len(prompt) for prompt, _ in answers]
        self.sizes = np.array([len(ids) - 1 for ids in self._ids])
        self.num_learned = sum(len(answer) for _, answer in answers)

    def conversation(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and mask of a sequence."""
        ids = self._ids[index]
        return ids, np.arange(len(ids)) >= self._begins[index]

    def place(self, index: int) -> str:
        """The number of a sequence."""
        return str(index)


def beside_trl(run: Run, model: torch.nn.Module) -> DpoTrainer:
    """TRL's trainer; from now on the run learns from its rows.

    Args:
        run: has a folder to write to.
        model: of transformers or PEFT, with the run's weights.
    """
    config, theirs = run.config, DpoTrainer(model, run.config)
    source = PairSource(SamePairs(theirs.rows), config.sample_length, is_packed=False)
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
    """Pairs of random words, `length` of the prompt and of each answer: its end token is only a label."""
    draw, keys = np.random.default_rng(0), ("prompt", "chosen", "rejected")

    def text() -> str:
        return "".join(f"{word} " for word in draw.integers(2, vocab_size, length))

    return [{key: text() for key in keys} for _ in range(number)]
