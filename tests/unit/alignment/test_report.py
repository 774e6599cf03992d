"""What the alignment report is made of: prompts, statistics and the verdict's bounds."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from llama3_tokenizer import build_tiny_tokenizer

from patch.alignment.logits import PROMPT_LENGTHS, LogitStats, compare_logits, make_prompts
from patch.alignment.report import Measured
from patch.alignment.verdict import judge

EQUAL = LogitStats(max=0.0, mean=0.0, cosine=1.0, kl=0.0, top1=1.0)
NORMAL = Measured(
    hf="hf", mcore="mcore", device="cpu", precision="fp32", attention="sdpa", prompts=[5], num_weights=21,
    rounded=False, weights=[], disagreements=[], fast=EQUAL, aligned=EQUAL, first=None,
    sources={"rmsnorm": 0.0, "attention": 0.0},
)  # fmt: skip


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


@pytest.mark.parametrize(
    "changes",
    [
        {"fast": EQUAL._replace(max=9e-5)},
        {"precision": "bf16", "fast": EQUAL._replace(max=0.5, cosine=0.9991, top1=0.9)},
        {"device": "cuda", "aligned": EQUAL._replace(max=9e-5)},
    ],
)
def test_what_another_order_explains_is_normal(changes: dict) -> None:
    assert judge(NORMAL._replace(**changes)).is_normal


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fast": EQUAL._replace(max=2e-4)}, "Without --precision-align the logits are beyond"),
        ({"fast": EQUAL._replace(top1=0.99)}, "Without --precision-align the logits are beyond"),
        ({"fast": EQUAL._replace(max=math.nan)}, "Without --precision-align the logits are beyond"),
        ({"precision": "bf16", "fast": EQUAL._replace(cosine=0.998)}, "beyond the bound of bf16"),
        ({"precision": "bf16", "fast": EQUAL._replace(cosine=math.nan)}, "beyond the bound of bf16"),
        ({"aligned": EQUAL._replace(max=1e-8)}, "should be equal to the bit"),
        (
            {"device": "cuda", "aligned": EQUAL._replace(max=1e-3)},
            "With --precision-align the logits are beyond",
        ),
    ],
)
def test_what_it_does_not_explain_is_not(changes: dict, words: str) -> None:
    verdict = judge(NORMAL._replace(**changes))
    assert not verdict.is_normal and words in verdict.text
