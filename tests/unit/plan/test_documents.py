"""The closed form of a step against the scaling tables of the project's source documents, within 10 %.

Every constant that was assumed is in `Assumed`, with where it is from; none is from a row that it predicts.
What the documents do not say, and what they say in pictures alone, is predicted as a range.
"""

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import hf_families
import pytest
from planned_runs import H100, planned_run

from patch.config import RunConfig
from patch.device import MachineFacts
from patch.families import weight_rows
from patch.plan.describe import describe_plan, plan_rows
from patch.plan.fits import fit_of
from patch.plan.flops import flops_per_step
from patch.plan.parameters import parameters_per_rank, total_parameters
from patch.plan.pipeline import Schedule, simulate
from patch.plan.timing.machine import PRESETS
from patch.plan.timing.step_time import ReplicaMessages
from patch.preflight.parse import parse_args


class Assumed(NamedTuple):
    """Constants, in seconds, bytes, FLOP/s and elements."""

    length: int = 2048
    """Of LLaMA's sequences (its paper); the document says 4 M tokens for a batch of 2048 of them."""
    batch: int = 2048
    """Megatron-LLaMA's readme, below its first table."""
    tp_size: int = 2
    micro_batch: int = 4
    """Both, and the bucket: Megatron-LLaMA's script for 13B on many nodes; the readme does not say them."""
    bucket: int = 400_000_000
    step_32: float = 2048 * 2048 / (10e9 / (40.3 * 3600))
    """The readme's row of 32 GPUs (DistributedOptimizer): 40.3 hours for 10 G tokens."""
    messages_over_compute: float = 1.0
    """Of its DistributedOptimizer with one micro-batch: "more than 50 % of the whole time", a lower bound."""
    slower_beside_messages: float = 108 / (108 - 16)
    """NCCL_MIN_NCHANNELS=16 in its pretrain_llama.py: each channel takes one of the A100's 108 processors."""
    network_13b: float = 4 * 25e9
    """Bytes/s of a node, each way: "4x200Gbps RDMA"."""
    network_bloom: float = 4 * 12.5e9
    """BLOOM's document: four Omni-Path links of a node; 100 Gbit/s each (Intel's data sheet)."""
    bloom: tuple[int, int, int, int] = (4, 12, 8, 2)
    """TP, PP, DP, micro-batch: its training README, which the document links but does not quote."""
    node_link: float = 230e9
    """Bytes/s of a collective over an A100's NVLink, of 300 (nccl-tests)."""
    pai_best: float = 212.1e12
    """FLOP/s of the article's best run of 8B on 8 A100s without offload."""


A = Assumed()


def _llama(size: str, length: int, *flags: str) -> RunConfig:
    argv = (
        f"--model-size {size} --seq-length {length} --micro-batch-size 1 --global-batch-size 64 "
        "--train-iters 1 --lr 1 --train-data-path a --output-path b"
    )
    return parse_args([*argv.split(), *flags], {}, MachineFacts(8, 16)).config


def _flops_per_token(config: RunConfig) -> float:
    return flops_per_step(config).model / config.training.global_batch_size / config.sample_length


LLAMA_13B = _llama("llama1-13B", A.length, "--tensor-model-parallel-size", str(A.tp_size))
(WEIGHTS_13B,) = parameters_per_rank(LLAMA_13B)
MICRO_BATCH_13B = A.step_32 / (32 + A.messages_over_compute)
"""Seconds of compute of a micro-batch: the 32 GPUs' step has 32 of them and messages once."""
TOKENS_13B = A.micro_batch * A.length / A.tp_size
"""Of a micro-batch, a GPU's share."""
RATE = _flops_per_token(LLAMA_13B) * TOKENS_13B / MICRO_BATCH_13B
"""FLOP/s of an A100 while it computes: 177e12."""
MESSAGES_13B = A.messages_over_compute * MICRO_BATCH_13B
"""Seconds of reductions and gathers of a step: 4 and 2 bytes of each weight."""
NETWORK_SHARE = 6 * WEIGHTS_13B / MESSAGES_13B / (A.network_13b / 2)
"""Share of the network that collectives reach, two TP ranks' groups beside each other: 0.42."""


def tokens_per_gpu(gpus: int, *, gradients: bool, weights: bool) -> float:
    """Return the tokens/s per GPU of 13B. `gradients`, `weights`: their messages overlap with compute."""
    count, contention = A.batch // A.micro_batch // (gpus // A.tp_size), A.slower_beside_messages - 1
    last = A.bucket / WEIGHTS_13B
    reduce, gather = (
        ReplicaMessages(MESSAGES_13B * share, MESSAGES_13B * share * last) for share in (4 / 6, 2 / 6)
    )
    forward, backward = MICRO_BATCH_13B / 3, MICRO_BATCH_13B * 2 / 3
    seconds = count * (forward + backward)
    if gradients:
        seconds += reduce.exposed(backward, forward + backward, count) + reduce.slowed(contention, count)
    else:
        seconds += reduce.seconds
    seconds += gather.exposed(forward) + gather.slowed(contention) if weights else gather.seconds
    return A.batch * A.length / gpus / seconds


def distributed_optimizer(gpus: int) -> float:
    return tokens_per_gpu(gpus, gradients=False, weights=False)


def overlapped(gpus: int, *, weights: bool = False) -> float:
    """Megatron-LLaMA's: reduces every micro-batch, and gathered weights without overlap at first."""
    return tokens_per_gpu(gpus, gradients=True, weights=weights)


def test_13b_with_distributed_optimizer() -> None:
    """The readme's rows of 256 and 512 GPUs, and "about 0.7" of the 32 GPUs' speed on 512."""
    assert distributed_optimizer(32) == pytest.approx(2154, rel=1e-3)  # where constants are from
    assert distributed_optimizer(256) == pytest.approx(1630, rel=0.10)
    assert distributed_optimizer(512) == pytest.approx(1430, rel=0.05)
    assert distributed_optimizer(512) / distributed_optimizer(32) == pytest.approx(0.7, rel=0.05)


def test_13b_with_overlapped_optimizer() -> None:
    """The readme's rows, its scaling of 0.85, and a later edition's rows, whose gathers overlap too."""
    assert overlapped(256) == pytest.approx(1800, rel=0.05)
    assert overlapped(512) == pytest.approx(1660, rel=0.05)
    assert overlapped(512) / overlapped(32) == pytest.approx(0.85, rel=0.05)
    assert overlapped(256, weights=True) == pytest.approx(1890, rel=0.05)
    assert overlapped(512, weights=True) == pytest.approx(1845, rel=0.05)


BLOOM = _llama(
    "bloom-176b", A.length, *(
        f"--{name}-model-parallel-size={size}"
        for name, size in zip(("tensor", "pipeline"), A.bloom[:2], strict=True)
    ),
    "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split",
)  # fmt: skip


def bloom_step() -> float:
    """Seconds: 72 layers on 12 stages, embedding and loss counted as two of them, all recomputed.

    ZeRO-1 after backward, fp32 gradients. The embedding counts as a layer, as the document says.
    """
    (tp_size, pp_size, dp_size, micro_batch), model = A.bloom, BLOOM.model
    tokens, hidden, elements = micro_batch * A.length, model.hidden_size, parameters_per_rank(BLOOM)
    layer = (24 * hidden**2 + 4 * A.length * hidden) * tokens / tp_size / RATE
    output = 2 * hidden * model.vocab_size * tokens / tp_size / RATE
    forward = [layers * layer for layers in BLOOM.stage_layers]
    backward = [3 * seconds for seconds in forward]
    forward[-1], backward[-1] = forward[-1] + output, backward[-1] + 2 * output
    link = A.network_bloom / 8 * NETWORK_SHARE
    message = 2 * tokens * hidden / tp_size / link
    for stage in range(pp_size):  # the sender waits
        forward[stage] += message if stage + 1 < pp_size else 0
        backward[stage] += message if stage else 0
    count = A.batch // dp_size // micro_batch
    timing = simulate(Schedule(pp_size, 1, count, 1), forward, backward)
    sent = 10 * (dp_size - 1) / dp_size / link
    return max(end + sent * numel for end, numel in zip(timing.ends, elements, strict=True))


def test_sizes_of_bloom() -> None:
    """ "2.3TB" (fp32 states, weights in bf16 and fp32), "329GB", an embedding of 7.2 GB, a layer of 4.9 GB.

    They are read as 1024^3 bytes in the first two, and as 1e9 in the others. The paper of the formulas is
    Korthikanti's; the document's stages are 70 layers and the two that count as one.
    """
    model, (row, *_) = BLOOM.model, weight_rows(BLOOM.model)
    total, hidden = total_parameters(model), model.hidden_size
    assert 14 * total / 2**30 == pytest.approx(2300, rel=0.005)
    assert 2 * total / 2**30 == pytest.approx(329, rel=0.005)
    assert 2 * row.num_elements / 1e9 == pytest.approx(7.2, rel=0.01)
    of_layer = sum(row.num_elements for row in weight_rows(model) if row.is_per_layer)
    assert of_layer == 12 * hidden**2 + 13 * hidden and 2 * of_layer / 1e9 == pytest.approx(4.9, rel=0.01)
    assert BLOOM.stage_layers == [5, *[6] * 10, 5]
    first, *between, last = parameters_per_rank(BLOOM)
    assert {*between} == {between[0]} and max(first, last) / between[0] == pytest.approx(1.08, rel=0.01)


def _lines(config: RunConfig, machine: MachineFacts) -> list[str]:
    return [text for row in plan_rows(config, machine) for text in row.formulas]


@pytest.mark.parametrize(
    ("flags", "formula", "size"),
    [
        ((), "s b h (34 + 5 a s / h) = ", 34 + 80),
        (("--tensor-model-parallel-size=8",), "s b h (10 + 24 / t + 5 a s / (h t)) = ", 10 + 3 + 10),
        (("--tensor-model-parallel-size=8", "--sequence-parallel"), " / 8 = ", (34 + 80) / 8),
    ],
)
def test_formulas_of_papers_for_gpt_3(flags: tuple[str, ...], formula: str, size: float) -> None:
    """Of Korthikanti: 5 a s / h is 80 for 96 layers of 12,288 with 96 heads at 2048 tokens."""
    own = ("--hidden-size=12288", "--ffn-hidden-size=49152", "--num-layers=96", "--num-attention-heads=96")
    config = _llama("bloom-176b", 2048, *own, "--num-query-groups=96", *flags)
    lines = _lines(config, MachineFacts(8, 16))
    (kept,) = (text for text in lines if "nothing recomputed" in text)
    assert f"{formula}{size * 2048 * 12288 / 2**30:.2f} GiB" in kept
    ours = flops_per_step(config).model + 3 * 64 * 96 * 2 * 2048 * 2047 * 12288  # the hidden half of scores
    twice = ours + 3 * 64 * 96 * 4 * 2048**2 * 12288  # all of attention
    for part, step in ((6, ours), (3, twice)):
        assert any(f"(1 + s / ({part} h) + V / (12 h L)) = {step:.4g}; this model" in text for text in lines)


@pytest.mark.parametrize("name", [*hf_families.FAMILIES, *hf_families.MIXTURES])
def test_formulas_stand_beside_the_parameters_of_transformers(tmp_path: Path, name: str) -> None:
    """The counts of attention, MLP, norms and the whole model agree."""
    theirs = dict(hf_families.family_model(name, tmp_path).named_parameters())
    config = hf_families.family_run(tmp_path)
    count = Counter({key: 0.0 for key in ("attention", "MLP", "norms")})
    for path, values in theirs.items():
        if re.search(r"\.(layers|h)\.\d", path):
            kind = "norms" if "norm" in path else "attention" if "self_att" in path else "MLP"
            count[kind] += values.numel() / config.model.num_layers
    lines = [text for text in _lines(config, MachineFacts(8, 16)) if text.startswith("papers, ")]
    counts = r"papers, (?:the )?(\w+)(?: of a layer)?: .* = \d+; this model (\d+)"
    found = dict(re.findall(counts, "\n".join(lines)))
    assert found.pop("model") == str(sum(each.numel() for each in theirs.values()))
    assert found == {key: str(round(size)) for key, size in count.items()}


def test_messages_by_hand() -> None:
    """8B at 8192 tokens, TP 2 with SP: 64 MiB of hidden states. Four all-reduces send them four times.

    Forward gathers and scatters twice, backward also gathers inputs again: ten times half of them.
    """
    flags = "--tensor-model-parallel-size=2 --sequence-parallel --pipeline-model-parallel-size=2"
    lines = _lines(_llama("8B", 8192, *flags.split()), MachineFacts(8, 16))
    expected = "0.25 GiB; this model 0.31 GiB", "0.06 GiB; this model 0.03 GiB"
    assert all(any(f" = {each}" in text for text in lines) for each in expected)


def test_pai_70b_with_64k_on_32_a100s() -> None:
    """16K needs recomputation or offload, 64K fits with both; our loss has no logits, so less is enough."""

    def fits(length: int, *flags: str) -> bool:
        more = " ".join(("--sequence-parallel --global-batch-size=64", *flags))
        run = planned_run(tp=8, pp=4, size="70B", length=length, flags=more, machine=PRESETS["a100"])
        return fit_of(run, PRESETS["a100"].facts).is_whole

    offload = "--optimizer-offload-policy=static"
    full, of_32 = "--recompute-granularity=full", "--recompute-granularity=selective"
    assert not fits(16384) and fits(16384, offload) and fits(16384, full)
    assert not fits(32768, of_32) and not fits(32768, offload) and fits(32768, of_32, offload)
    assert not fits(65536, offload) and not fits(65536, of_32, offload) and fits(65536, full, offload)


def test_a_tp_group_that_leaves_its_machine_is_warned_of() -> None:
    runs = [planned_run(order, tp=4, dp=4) for order in ("dp-tp-cp-pp", "tp-cp-dp-pp")]
    text = "warning     TP 4 leaves the machine, which has 2 of a TP group"
    assert [text in describe_plan(run, H100.facts) for run in runs] == [True, False]


def test_bloom_on_384_gpus() -> None:
    """ "3 hours (100 iterations)", "about 1 M hours", "3.5 months", with the speed of 13B's table.

    DeepSpeed's reductions are taken as an all-reduce of fp32 gradients; with reduce-scatters 108 s.
    """
    seconds, steps = bloom_step(), 350e9 / (A.batch * A.length)
    assert seconds == pytest.approx(3 * 3600 / 100, rel=0.10)
    assert steps * seconds * 384 / 3600 == pytest.approx(1e6, rel=0.10)
    assert steps * seconds / 86400 == pytest.approx(3.5 * 30.4, rel=0.10)


def recomputed(size: str, length: int) -> float:
    """Speed with all layers recomputed, over that without."""
    model, hardware = flops_per_step(_llama(size, length, "--recompute-granularity=full"))
    return model / hardware


def test_pai_offload_against_recomputation() -> None:
    """70B at 16K: 376 with offload and 289 with recomputation; 8B: recomputation 12 % below offload (196.5).

    An offload that hides all of its time gives 0.75 for the first; the article does not say how much of 8B
    it recomputes; all of it is taken.
    """
    assert 376 * recomputed("70B", 16384) == pytest.approx(289, rel=0.05)
    assert 212.1 * recomputed("8B", 4096) / 196.5 == pytest.approx(0.88, rel=0.10)
