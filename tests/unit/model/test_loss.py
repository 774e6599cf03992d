"""The loss without logits: upstream's bits in one chunk, its precision in several, and a chunk's memory."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from distributed_runner import new_job, run_distributed
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from small_runs import small_run
from training_runs import CPU, build_stages

from patch import compat
from patch.distributed.groups import initialize
from patch.model import LlamaModel, LossMask, initialize_weights
from patch.model.loss import TeacherTokens, VocabularyShard, chunk_length, linear_cross_entropy
from toolkits.benchmarks._measure import peak_bytes

LENGTH, ROWS, GRADIENT = 22, 2, 0.25
CASES: dict[str, dict[str, Any]] = {
    "alone": {"dp": 2},
    "padding": {"dp": 2, "make_vocab_size_divisible_by": 512},
    "tp": {"tp": 2},
    "sp": {"tp": 2, "sequence_parallel": True},
    "nothing but padding on a rank": {"tp": 2, "vocab_size": 100, "make_vocab_size_divisible_by": 128},
}
PRECISIONS = ["fp32", "bf16", "fp16"]
CHUNKS = [1, 7, LENGTH * ROWS]
TAUGHT = [(3, 1.0), (250, 2.5)]
"""Tokens of a teacher, and its temperature; 250 are the whole vocabulary."""


class Found(NamedTuple):
    """The loss, and its gradients of the hidden states and of this rank's part of the weight."""

    loss: torch.Tensor
    hidden: torch.Tensor
    weight: torch.Tensor | None

    def same_bits(self, other: "Found") -> list[bool]:
        return [torch.equal(a, b) for a, b in zip(self, other, strict=True)]

    def errors(self, exact: "Found") -> list[float]:
        """The norm of each one's difference, as a share of its norm."""
        return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(self, exact, strict=True)]


class Problem:
    """Hidden states, labels and mask for a model, equal on all ranks."""

    def __init__(self, model: LlamaModel, vocab_size: int, tp_rank: int) -> None:
        torch.manual_seed(3)
        self.model, self.group = model, model.pg_collection.tp
        dtype = model.config.params_dtype
        self.whole = torch.randn(LENGTH, ROWS, model.config.hidden_size).to(dtype)
        sp_size = self.group.size() if model.config.sequence_parallel else 1
        self.own = self.whole.chunk(sp_size)[tp_rank if sp_size > 1 else 0]
        self.labels = torch.randint(0, vocab_size, (ROWS, LENGTH))
        self.labels[0, 3] = -100  # an ignored label, which is in no rank's vocabulary
        self.learned = LossMask((torch.rand(ROWS, LENGTH) < 0.7).float(), GRADIENT)
        self.learned.mask[0, 3] = 0

    def teacher(self, count: int, temperature: float, vocab_size: int) -> TeacherTokens:
        """Return a teacher with random logits."""
        logits = (torch.randn(LENGTH, ROWS, vocab_size) * 3).transpose(0, 1)
        logs = F.log_softmax(logits / temperature, dim=2)
        top, ids = logs.topk(count, dim=2)
        rest = logs.exp().scatter(2, ids, 0.0).sum(dim=2, keepdim=True).clamp(min=1e-38).log()
        return TeacherTokens(torch.cat((ids, top, rest), dim=2), 0.7, temperature)

    def upstream(self) -> Found:
        """By megatron-core's output layer and cross entropy, which hold all logits."""

        def loss(hidden: torch.Tensor) -> torch.Tensor:
            logits, _ = self.model.output_layer(hidden)
            losses = self.model.compute_language_model_loss(self.labels, logits)
            return (losses * self.learned.mask).sum()

        return self._found(loss, self.own)

    def ours(self, gradient: float | None = GRADIENT) -> Found:
        """Without a gradient from each token's loss."""
        learned = self.learned._replace(gradient=gradient)
        weights = self.learned.mask if gradient is None else torch.ones(())
        losses = partial(self.model.summed_loss, labels=self.labels, learned=learned)
        return self._found(lambda hidden: (losses(hidden) * weights).sum(), self.own)

    def in_chunks(self, chunk: int) -> Found:
        weight = self.model.output_layer.weight
        part = VocabularyShard(self.group.rank() * len(weight), self.model.num_vocab_rows, self.group)

        def loss(hidden: torch.Tensor) -> torch.Tensor:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self.group)
            return linear_cross_entropy(
                hidden, weight, self.labels, self.learned, part, is_fused=False, chunk=chunk
            )

        return self._found(loss, self.whole)

    def taught(self, chunk: int, teacher: TeacherTokens) -> Found:
        """With the gradient that was expected; the loss is the three sums."""
        weight, learned = self.model.output_layer.weight, self.learned._replace(teacher=teacher)
        part = VocabularyShard(self.group.rank() * len(weight), self.model.num_vocab_rows, self.group)

        def losses(hidden: torch.Tensor) -> torch.Tensor:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self.group)
            return linear_cross_entropy(
                hidden, weight, self.labels, learned, part, is_fused=False, chunk=chunk
            )

        return self._found(losses, self.whole)

    def exact(self, vocab_size: int, teacher: TeacherTokens | None = None) -> Found:
        """In float64, from the whole vocabulary; the weight's gradient is this rank's part."""
        own = self.model.output_layer.weight.detach()
        rows = gather_from_tensor_model_parallel_region(own.t().contiguous(), group=self.group).t()
        weight, hidden = (tensor.double().detach().requires_grad_() for tensor in (rows, self.whole))
        logits = (hidden @ weight[:vocab_size].t()).transpose(0, 1).flatten(0, 1)
        losses = F.cross_entropy(logits, self.labels.flatten(), reduction="none")
        loss = (losses * self.learned.mask.flatten()).sum()
        if teacher is not None:
            kl = self._divergence(logits, teacher)
            whole = teacher.temperature**2 * teacher.alpha * kl + (1 - teacher.alpha) * loss
            loss = torch.stack((whole, loss, kl))
        (loss.flatten()[0] * GRADIENT).backward()
        part = weight.grad[self.group.rank() * len(own) :][: len(own)]
        return Found(loss.detach(), hidden.grad, part)

    def _divergence(self, logits: torch.Tensor, teacher: TeacherTokens) -> torch.Tensor:
        """By torch's kl_div. If all tokens are chosen, it is that of the whole vocabulary."""
        taught = teacher.taught.flatten(0, 1)
        ids, goal = taught.tensor_split([taught.shape[1] // 2], dim=1)
        logs = F.log_softmax(logits / teacher.temperature, dim=1)
        own = logs.gather(1, ids.long())
        if ids.shape[1] == logs.shape[1]:
            goal = goal[:, :-1]
        else:
            rest = logs.exp().scatter(1, ids.long(), 0.0).sum(dim=1, keepdim=True).log()
            own = torch.cat((own, rest), dim=1)
        each = F.kl_div(own, goal.double(), reduction="none", log_target=True).sum(dim=1)
        return (each * self.learned.mask.flatten()).sum()

    def _found(self, compute: Any, hidden: torch.Tensor) -> Found:
        weight = self.model.output_layer.weight
        weight.grad = None
        leaf = hidden.detach().clone().requires_grad_()
        loss = compute(leaf)
        (loss.flatten()[0] * GRADIENT).backward()
        return Found(loss.detach(), leaf.grad, weight.grad)


def problems(rank: int) -> Iterator[tuple[tuple[str, str], Problem, int]]:
    for name, changes in CASES.items():
        for precision in PRECISIONS:
            config = small_run(**changes, precision=precision)
            _, (model,) = build_stages(config)
            initialize_weights([model], config.model, seed=1)
            tp_rank = rank if "tp" in changes else 0
            yield (name, precision), Problem(model, config.model.vocab_size, tp_rank), config.model.vocab_size
            new_job()


def run_all(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[Any, Any] = {}
    for case, problem, vocab_size in problems(rank):
        upstream, exact = problem.upstream(), problem.exact(vocab_size)
        found[case] = {
            "same bits": [upstream.same_bits(problem.ours(gradient)) for gradient in (GRADIENT, None)],
            "another gradient": upstream.same_bits(problem.ours(gradient=8 * GRADIENT)),
            "upstream's error": upstream.errors(exact) if case[0] != "sp" else None,
            "errors": [problem.in_chunks(chunk).errors(exact) for chunk in CHUNKS],
        }
        for count, temperature in TAUGHT:
            teacher = problem.teacher(min(count, vocab_size), temperature, vocab_size)
            exact, runs = problem.exact(vocab_size, teacher), [problem.taught(c, teacher) for c in CHUNKS]
            found[case][f"taught {count}"] = [run.errors(exact) for run in runs]
    check_other_backwards(problem)
    return found


def check_other_backwards(problem: Problem) -> None:
    """A frozen weight has no gradient. `no_grad` records nothing. A second backward is refused."""
    weight, expected = problem.model.output_layer.weight, problem.ours()
    weight.requires_grad_(False)
    frozen = problem.ours()
    weight.requires_grad_(True)
    assert frozen.weight is None and torch.equal(frozen.hidden, expected.hidden)
    inputs = problem.own.requires_grad_(), problem.labels, problem.learned
    with torch.no_grad():
        loss = problem.model.summed_loss(*inputs)
    assert loss.grad_fn is None and torch.equal(loss, expected.loss)
    loss = problem.model.summed_loss(*inputs)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.fixture(scope="module")
def results() -> list[dict[Any, Any]]:
    return run_distributed(run_all, 2)


@pytest.mark.long
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", CASES)
def test_one_chunk_has_upstreams_bits(results: list, case: str, precision: str) -> None:
    """In fp32 another gradient than was expected is only a factor."""
    for rank in results:
        assert rank[case, precision]["same bits"] == [[True] * 3] * 2
        assert precision != "fp32" or rank[case, precision]["another gradient"] == [True] * 3


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", CASES)
def test_chunks_are_as_precise_as_upstream(results: list, case: str, precision: str) -> None:
    """Against float64; with SP only our own form is called, with the whole hidden states."""
    for rank in results:
        of_upstream = rank["tp" if case == "sp" else case, precision]["upstream's error"]
        for errors in rank[case, precision]["errors"]:
            assert all(own <= 1.5 * other + 1e-7 for own, other in zip(errors, of_upstream, strict=True))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", CASES)
def test_loss_with_a_teacher_is_torchs_divergence_and_cross_entropy(
    results: list, case: str, precision: str
) -> None:
    """In float64, also that of the whole vocabulary; rounded as the loss without a teacher."""
    for rank in results:
        of_upstream = rank["tp" if case == "sp" else case, precision]["upstream's error"]
        bounds = [5 * error + 1e-6 for error in of_upstream]
        for count, _ in TAUGHT:
            for errors in rank[case, precision][f"taught {count}"]:
                assert all(own <= bound for own, bound in zip(errors, bounds, strict=True)), (count, errors)


def run_peaks(rank: int, world_size: int) -> tuple[int, int, int]:
    tokens, vocab_size, width = 2048, 4096, 16
    config = small_run(vocab_size=vocab_size, hidden_size=width)
    compat.apply(cuda=False)
    group = initialize(config, CPU).tp
    hidden = torch.randn(tokens, 1, width).requires_grad_()
    weight = torch.randn(vocab_size, width).requires_grad_()
    labels = torch.randint(0, vocab_size, (1, tokens))
    learned = LossMask(torch.ones(1, tokens), 1.0)
    part = VocabularyShard(0, vocab_size, group)

    taught = torch.tensor([0.0, 1.0, 2.0, *[math.log(0.25)] * 4]).expand(1, tokens, 7)
    with_teacher = learned._replace(teacher=TeacherTokens(taught, 0.5, 2.0))

    def chunked(learned: LossMask = learned) -> None:
        losses = linear_cross_entropy(hidden, weight, labels, learned, part, is_fused=False, chunk=128)
        losses.flatten()[0].backward()

    def plain() -> None:
        F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), labels.flatten(), reduction="sum").backward()

    works = plain, chunked, partial(chunked, with_teacher)
    return tuple(peak_bytes(work, CPU.device) for work in works)


def test_the_logits_never_exist_at_once() -> None:
    plain, chunked, taught = run_distributed(run_peaks, 1)[0]
    assert plain > 2048 * 4096 * 4 and chunked < plain / 8
    assert taught < chunked + 1.1 * 128 * 4096 * 4, "one more float32 copy of a chunk, as the plan says"


@pytest.mark.parametrize(
    ("vocab_rows", "hidden_size", "tokens"),
    [(128256, 64, 130), (128256, 4096, 1024), (16032, 16384, 4096), (250, 64, 67108), (2**26, 1, 1)],
)
def test_a_chunk_is_large_enough_for_its_products(vocab_rows: int, hidden_size: int, tokens: int) -> None:
    assert chunk_length(vocab_rows, hidden_size) == tokens
    assert chunk_length(vocab_rows, hidden_size, cuda=True) == max(tokens, 2048), "H100: 1.7 x its ridge"
