"""The loss in Triton: its interpreter against torch, alone and over TP, and what a GPU would run."""

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed_runner import run_distributed
from triton_interpreter import give_writer, interpreted, output_of_compiler, rounding

from patch.model.loss import LossMask, VocabularyShard, linear_cross_entropy

pytest.importorskip("triton.language", reason="Triton is not installed: pip install triton")

MODULE = "patch.model.kernels.fused_loss"
TOKENS = 7
SHAPES = {"one word": (1, 1), "odd": (251, 251), "a block and more": (4097, 4097), "padding": (5120, 5003)}
"""Rows of the vocabulary with padding, and without."""
OVER_TP = {"halves": (514, 513), "nothing but padding on a rank": (512, 200)}
BOUNDS = {torch.float32: (1e-6, 1e-7), torch.bfloat16: (2**-8, 1e-6), torch.float16: (2**-10, 1e-6)}
"""Relative and absolute, of gradients: of float32 numbers, then half a digit of those that are stored."""
LOSS_BOUND = 1e-6


class Problem(NamedTuple):
    """Logits [T, V] of the whole vocabulary, labels [T], each loss's gradient [T]."""

    logits: torch.Tensor
    labels: torch.Tensor
    gradient: torch.Tensor

    @staticmethod
    def make(shape: tuple[int, int], dtype: torch.dtype) -> "Problem":
        torch.manual_seed(0)
        logits = (2 * torch.randn(TOKENS, shape[0])).to(dtype)
        logits[1] += 300  # exponentials overflow without the largest one
        logits[2, : shape[1] // 4] = float("-inf")
        labels = torch.randint(0, shape[1], (TOKENS,))
        labels[2] = shape[1] - 1
        labels[3] = -100
        gradient = torch.tensor([0.25, 1.0, 0.5, 0.0, 0.125, 2.0, 0.0])
        return Problem(logits, labels, gradient)

    def expected(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses and gradients by torch, in float64."""
        logits = self.logits[:, :num_rows].double().requires_grad_()
        losses = F.cross_entropy(logits, self.labels, reduction="none")
        losses.backward(self.gradient.double())
        assert logits.grad is not None
        return losses.detach(), F.pad(logits.grad, (0, self.logits.shape[1] - num_rows))


def check(problem: Problem, num_rows: int, group: dist.ProcessGroup) -> None:
    """This rank's part of the vocabulary by the kernels, against torch."""
    from patch.model.kernels.fused_loss import losses_and_gradients

    own = problem.logits.chunk(group.size(), dim=1)[group.rank()].clone()
    first = group.rank() * own.shape[1]
    rows = min(max(num_rows - first, 0), own.shape[1])
    losses = losses_and_gradients(
        own, problem.labels, problem.gradient, first=first, num_rows=rows, group=group
    )
    expected, gradients = problem.expected(num_rows)
    learned = problem.labels >= 0
    torch.testing.assert_close(losses[learned].double(), expected[learned], rtol=LOSS_BOUND, atol=1e-6)
    rtol, atol = BOUNDS[own.dtype]
    part = gradients[:, first : first + own.shape[1]]
    torch.testing.assert_close(own.double(), part, rtol=rtol, atol=atol)


def cases() -> Iterator[tuple[str, tuple[int, int], torch.dtype]]:
    for name, shape in (SHAPES | OVER_TP).items():
        for dtype in BOUNDS:
            yield name, shape, dtype


def run_all(rank: int, world_size: int) -> None:
    alone = [dist.new_group([each]) for each in range(world_size)][rank]
    both = dist.new_group([0, 1])
    with interpreted(MODULE, rounding):
        for name, shape, dtype in cases():
            check(Problem.make(shape, dtype), shape[1], both if name in OVER_TP else alone)
        check_not_finite(alone)


def check_not_finite(group: Any) -> None:
    """A row with such a number has no loss, as in torch; the others have theirs."""
    from patch.model.kernels.fused_loss import losses_and_gradients

    for number in (float("nan"), float("inf")):
        problem = Problem.make((251, 251), torch.bfloat16)
        problem.logits[0, 100] = number
        losses = losses_and_gradients(
            problem.logits, problem.labels, problem.gradient, first=0, num_rows=251, group=group
        )
        assert losses.isfinite().tolist() == [False] + [True] * (TOKENS - 1), (number, losses)
        assert problem.logits[0].isnan().any()
        assert problem.logits[1:].isfinite().all()


def test_losses_and_gradients_are_torchs_alone_and_over_tp() -> None:
    run_distributed(run_all, 2)


@pytest.mark.parametrize("expected", [0.5, 0.25, None])
# The gradients of the logits are kept up to 32 tokens: an element has two bytes, and the weight 16 columns.
@pytest.mark.parametrize(("chunk", "tokens"), [(5, 12), (32, 32), (16, 33)])
@pytest.mark.parametrize(("kept_as", "bound"), [(torch.float32, 5e-3), (torch.bfloat16, 9e-3)])
def test_the_weights_gradient_is_added_to_the_main_gradient_without_a_rounding(
    expected: float | None, chunk: int, tokens: int, kept_as: torch.dtype, bound: float
) -> None:
    """Two micro-batches; `bound` is that of logits and their gradients in bfloat16, and of the sum's type."""
    torch.manual_seed(0)
    weight = torch.randn(300, 16).bfloat16().requires_grad_()
    total, exact = torch.full((300, 16), torch.nan, dtype=kept_as), torch.zeros(300, 16, dtype=torch.float64)
    give_writer(weight, total)
    part = VocabularyShard(0, 290, SimpleNamespace(size=lambda: 1))  # type: ignore[arg-type]
    with interpreted(MODULE, rounding):
        for _ in range(2):
            hidden, labels = torch.randn(tokens, 1, 16).bfloat16(), torch.randint(0, 290, (1, tokens))
            learned = LossMask(torch.rand(1, tokens), expected)
            loss = linear_cross_entropy(hidden, weight, labels, learned, part, is_fused=True, chunk=chunk)
            (0.5 * (loss if expected else loss * learned.mask).sum()).backward()
            wide = weight.detach().double().requires_grad_()
            losses = F.cross_entropy(hidden[:, 0].double() @ wide[:290].t(), labels[0], reduction="none")
            exact += torch.autograd.grad(0.5 * (losses * learned.mask[0]).sum(), wide)[0]
    assert weight.grad is not None and not weight.grad.any(), "a stand-in"
    assert (total - exact).norm() <= bound * exact.norm()
    assert kept_as != torch.float32 or not torch.equal(total, total.bfloat16().float())


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from patch.model.kernels import fused_loss

KINDS = {"own": "*i64", "num_columns": "i32", "num_rows": "i32"}
for name, kind in [(n, k) for n in ("_statistics_of_row", "_gradients") for k in ("bf16", "fp32")]:
    kernel = getattr(fused_loss, name)
    signature = {a: KINDS.get(a, "*fp32") for a in kernel.arg_names} | {"logits": "*" + kind}
    attributes = {(i,): [["tt.divisibility", 16]] for i, a in enumerate(kernel.arg_names) if a != "num_rows"}
    source = ASTSource(fn=kernel, signature=signature, attrs=attributes)
    print(name, kind)
    print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"])
"""


def test_compiled_for_a_hopper_gpu_loads_are_wide_and_nothing_is_spilled() -> None:
    parts = re.split(r"^(_\w+ (?:bf16|fp32))$", output_of_compiler(COMPILE), flags=re.MULTILINE)[1:]
    assert len(parts) == 2 * 4
    for name, code in zip(parts[::2], parts[1::2], strict=True):
        assert re.search(r"ld\.global\.v4", code), name
        assert ".local" not in code, name
        assert ("st.global.v4" in code) == name.startswith("_gradients"), name
