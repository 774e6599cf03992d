"""Logits of two models on the same prompts: how far apart they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from patch.data import load_tokenizer
from patch.storage.names import TOKENIZER_FILES

PROMPT_LENGTHS = (5, 33, 129)
"""Tokens; kernels change with length, at 64 for one."""
_TEXT = (
    "The harbour was quiet before sunrise. Two boats lay at the pier, and a man counted crates: 17, 18, 19. "
    "'How many are missing?' asked the captain; nobody knew. By noon the answer was on the wall, in chalk, "
    "together with a sum: (3 + 4) * 12 = 84. def weight(crates): return sum(crate.mass for crate in crates) "
    "Le lendemain, il pleuvait. Am Abend lasen sie die Zeitung und lachten. E = mc^2, pi is about 3.14159; "
    "the train to the north leaves at 06:45 from platform 9. Please bring bread, salt, a lamp and paper. "
)


class LogitStats(NamedTuple):
    """Differences over all prompts; keys of the JSON report."""

    max: float
    """Largest absolute difference of a logit."""
    mean: float
    """Mean absolute difference."""
    cosine: float
    """Mean over positions of the cosine of the two vectors of logits."""
    kl: float
    """Mean over positions of KL(theirs || ours), in nats."""
    top1: float
    """Share of positions with the same most likely token."""


def make_prompts(folder: Path, vocab_size: int, longest: int) -> list[torch.Tensor]:
    """Token ids [1, S] of several lengths: a text in the folder's tokenizer, or else seeded ids.

    Args:
        longest: what the model takes at most.
    """
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
    """Float32 logits [S, V] on the CPU for each prompt, of a model of ours."""
    device = next(model.parameters()).device
    return [model(prompt.to(device), None, None)[0, :, :vocab_size].float().cpu() for prompt in prompts]


@torch.no_grad()
def compute_hf_logits(model: torch.nn.Module, prompts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same of a transformers model."""
    device = next(model.parameters()).device
    return [model(prompt.to(device), use_cache=False).logits[0].float().cpu() for prompt in prompts]


def compare_logits(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> LogitStats:
    """Statistics in float64 over all positions of all prompts; not finite logits give not finite numbers."""
    mine, expected = (torch.cat(list(logits)).double() for logits in (ours, theirs))
    distance = (mine - expected).abs()
    log_mine, log_expected = (logits.log_softmax(-1) for logits in (mine, expected))
    kl = (log_expected.exp() * (log_expected - log_mine)).sum(-1).mean().item()
    return LogitStats(
        max=distance.max().item(),
        mean=distance.mean().item(),
        cosine=torch.nn.functional.cosine_similarity(mine, expected, dim=-1).mean().item(),
        kl=kl if math.isnan(kl) else max(kl, 0.0),
        top1=(mine.argmax(-1) == expected.argmax(-1)).double().mean().item(),
    )
