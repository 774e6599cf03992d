"""Which measured differences are normal, at the bounds and beyond them."""

import math
from typing import Any

import pytest
import torch

from patch.alignment.logits import LogitStats
from patch.alignment.measure import LogitComparison, Measurement
from patch.alignment.routes import RouteComparison, _Replay
from patch.alignment.stored import ConfigDifference
from patch.alignment.verdict import TIES, judge
from patch.alignment.weights import WeightComparison, WeightDifference

EQUAL = LogitStats(max=0.0, mean=0.0, cosine=1.0, kl=0.0, top1=1.0)
NORMAL = Measurement(
    hf="hf", mcore="mcore", device="cpu", precision="fp32", attention="sdpa", prompt_lengths=[5],
    weights=WeightComparison(21, False, []), config_differences=[],
    logits=LogitComparison(EQUAL, EQUAL, None, {"rmsnorm": 0.0, "attention": 0.0}), parts={},
)  # fmt: skip


def changed(**changes: Any) -> Measurement:
    """NORMAL with other values of its own or of its logits."""
    logits = {name: changes.pop(name) for name in ("fast", "aligned", "routes") if name in changes}
    return NORMAL._replace(logits=NORMAL.logits._replace(**logits), **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"fast": EQUAL._replace(max=9e-5)},
        {"precision": "bf16", "fast": EQUAL._replace(max=0.5, cosine=0.9991, top1=0.9)},
        {"device": "cuda", "aligned": EQUAL._replace(max=9e-5)},
        {"device": "cuda", "routes": RouteComparison(99, 1, 9e-5), "aligned": EQUAL._replace(max=9e-5)},
    ],
)
def test_what_another_order_explains_is_normal(changes: dict) -> None:
    assert judge(changed(**changes)).is_normal


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fast": EQUAL._replace(max=2e-4)}, "Without --precision-align the logits are beyond"),
        ({"fast": EQUAL._replace(top1=0.99)}, "Without --precision-align the logits are beyond"),
        ({"fast": EQUAL._replace(max=math.nan)}, "Without --precision-align the logits are beyond"),
        ({"precision": "bf16", "fast": EQUAL._replace(cosine=0.998)}, "beyond the bound of bf16"),
        ({"precision": "bf16", "fast": EQUAL._replace(cosine=math.nan)}, "beyond the bound of bf16"),
        ({"aligned": EQUAL._replace(max=1e-8)}, "should be bit-equal"),
        ({"routes": RouteComparison(99, 1, 2e-4)}, "the weight of a router is wrong"),
        ({"routes": RouteComparison(99, 1, math.nan)}, "the weight of a router is wrong"),
        (
            {"device": "cuda", "aligned": EQUAL._replace(max=1e-3)},
            "With --precision-align the logits are beyond",
        ),
    ],
)
def test_what_it_does_not_explain_is_not(changes: dict, words: str) -> None:
    verdict = judge(changed(**changes))
    assert not verdict.is_normal and words in verdict.text


def test_a_tie_of_a_token_with_small_logits_is_one() -> None:
    logits = torch.tensor([[1.4, 0.2, -0.9], [0.129, 0.121, 0.229]])
    replay = _Replay([(logits.topk(2).indices, logits)], None)
    moved = logits + torch.tensor([0.0, 0.01, 0.0])
    replay.get_replay_topk(moved, 2, None, None, lambda scores, topk, *_: scores.topk(topk))
    tokens, differing, gap = replay.compared
    assert (tokens, differing) == (2, 1) and 0 < gap < TIES["bf16"] < 0.008 / 0.229


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"weights": WeightComparison(21, False, [WeightDifference("a", "is transposed")] * 2)},
            "2 of 21 weights differ: a is transposed; the report lists the others.",
        ),
        (
            {"config_differences": [ConfigDifference("rotary_base", 1e4, 5e5)]},
            "rotary_base is 10000.0 in the checkpoint, 500000.0 by config.json.",
        ),
    ],
)
def test_faults_of_what_is_stored_are_named(changes: dict, words: str) -> None:
    verdict = judge(changed(**changes))
    assert not verdict.is_normal and words in verdict.text
