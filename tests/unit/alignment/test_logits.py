"""Prompts, and the statistics of logits against NumPy's."""

from pathlib import Path

import numpy as np
import pytest
import torch
from llama3_tokenizer import build_tiny_tokenizer

from patch.alignment.logits import PROMPT_LENGTHS, LogitStats, compare_logits, make_prompts


def test_statistics_equal_numpys() -> None:
    generator = torch.Generator().manual_seed(0)
    theirs = [torch.randn(length, 50, generator=generator) for length in (3, 7)]
    ours = [logits + 0.3 * torch.randn(logits.shape, generator=generator) for logits in theirs]
    a, b = (np.concatenate(list(logits)).astype(np.float64) for logits in (ours, theirs))
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (b, a))
    expected = LogitStats(
        max=np.abs(a - b).max(),
        mean=np.abs(a - b).mean(),
        cosine=((a * b).sum(-1) / np.sqrt((a * a).sum(-1) * (b * b).sum(-1))).mean(),
        kl=(p * np.log(p / q)).sum(-1).mean(),
        top1=(a.argmax(-1) == b.argmax(-1)).mean(),
    )
    assert compare_logits(ours, theirs) == pytest.approx(expected)
    assert 0 < expected.top1 < 1


def test_prompts_are_text_where_there_is_a_tokenizer_and_seeded_ids_elsewhere(tmp_path: Path) -> None:
    seeded = make_prompts(tmp_path, 100, longest=512)
    build_tiny_tokenizer(tmp_path)
    text = make_prompts(tmp_path, 400, longest=64)
    assert [prompt.shape for prompt in seeded] == [(1, length) for length in PROMPT_LENGTHS]
    assert [prompt.shape for prompt in text] == [(1, min(length, 64)) for length in PROMPT_LENGTHS]
    assert torch.equal(text[-1][:, :5], text[0]) and not torch.equal(text[0], seeded[0])
    small = make_prompts(tmp_path, 100, longest=512)  # its ids go beyond such a vocabulary
    assert all(map(torch.equal, small, seeded))
