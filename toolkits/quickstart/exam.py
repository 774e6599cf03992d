"""Asks the exported model held-out questions with transformers, and counts the right answers."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from toolkits.quickstart.tasks import Example

MAX_ANSWER_TOKENS = 24


class Answered(NamedTuple):
    """A held-out question and the model's answer."""

    example: Example
    output: str

    @property
    def is_right(self) -> bool:
        """Whether the answer matches exactly, including case and white space."""
        return self.output == self.example.answer


def answer(folder: Path, examples: list[Example]) -> list[Answered]:
    """Greedy answers of the Hugging Face model in `folder`, all questions in one left-padded batch."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.padding_side = "left"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    conversations = [[{"role": "user", "content": example.question}] for example in examples]
    texts = tokenizer.apply_chat_template(conversations, tokenize=False, add_generation_prompt=True)
    prompts = tokenizer(texts, padding=True, add_special_tokens=False, return_tensors="pt")
    tokens = model.generate(**prompts, do_sample=False, max_new_tokens=MAX_ANSWER_TOKENS)
    outputs = tokenizer.batch_decode(tokens[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    return [Answered(example, text) for example, text in zip(examples, outputs, strict=True)]


def exact_match_percent(answered: list[Answered]) -> float:
    """Share of right answers, 0 to 100."""
    return 100.0 * sum(each.is_right for each in answered) / len(answered)
