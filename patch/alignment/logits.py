"""The logits of two models on the same prompts, and statistics of their difference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from patch.data import load_tokenizer
from patch.storage.names import TOKENIZER_FILES

PROMPT_LENGTHS = (5, 33, 129)
"""Tokens; some kernels change with the length, for example at 64."""
_TEXT = (
    "The harbour was quiet before sunrise. Two boats lay at the pier, and a man counted crates: 17, 18, 19. "
    "'How many are missing?' asked the captain; nobody knew. By noon the answer was on the wall, in chalk, "
    "together with a sum: (3 + 4) * 12 = 84. def weight(crates): return sum(crate.mass for crate in crates) "
    "Le lendemain, il pleuvait. Am Abend lasen sie die Zeitung und lachten. E = mc^2, pi is about 3.14159; "
    "the train to the north leaves at 06:45 from platform 9. Please bring bread, salt, a lamp and paper. "
)


class LogitStats(NamedTuple):
    """Differences over all prompts; field names are keys of the JSON report."""

    max: float
    """Largest absolute difference of a logit."""
    mean: float
    cosine: float
    """Mean over positions of the cosine between the two logit vectors."""
    kl: float
    """Mean over positions of KL(theirs || ours), in nats."""
    top1: float
    """Share of positions with the same most likely token."""


def make_prompts(folder: Path, vocab_size: int, longest: int) -> list[torch.Tensor]:
    """Return token ids [1, S] of several lengths: a text in the folder's tokenizer, or seeded random ids."""
    ids = _text_ids(folder)
    if len(ids) < max(PROMPT_LENGTHS) or max(ids) >= vocab_size:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(vocab_size, (max(PROMPT_LENGTHS),), generator=generator).tolist()
    return [torch.tensor([ids[: min(length, longest)]]) for length in PROMPT_LENGTHS]


def _text_ids(folder: Path) -> list[int]:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return []
    return load_tokenizer(str(folder))(_TEXT)["input_ids"]


@torch.no_grad()
def compute_logits(
    model: torch.nn.Module, prompts: Sequence[torch.Tensor], vocab_size: int
) -> list[torch.Tensor]:
    """Return float32 logits [S, V] of our model on the CPU for each prompt [1, S]; V is without padding."""
    device = next(model.parameters()).device
    return [model(prompt.to(device), None, None)[0, :, :vocab_size].float().cpu() for prompt in prompts]


@torch.no_grad()
def compute_hf_logits(model: torch.nn.Module, prompts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return float32 logits [S, V] of a transformers model on the CPU for each prompt [1, S]."""
    device = next(model.parameters()).device
    return [model(prompt.to(device), use_cache=False).logits[0].float().cpu() for prompt in prompts]


def compare_logits(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> LogitStats:
    """Return statistics in float64 over all positions of all prompts; not finite if a logit is not finite."""
    got, expected = torch.cat(list(ours)).double(), torch.cat(list(theirs)).double()
    distance = (got - expected).abs()
    log_got, log_expected = got.log_softmax(-1), expected.log_softmax(-1)
    kl = (log_expected.exp() * (log_expected - log_got)).sum(-1).mean().item()
    return LogitStats(
        max=distance.max().item(),
        mean=distance.mean().item(),
        cosine=torch.nn.functional.cosine_similarity(got, expected, dim=-1).mean().item(),
        kl=kl if math.isnan(kl) else max(kl, 0.0),
        top1=(got.argmax(-1) == expected.argmax(-1)).double().mean().item(),
    )
