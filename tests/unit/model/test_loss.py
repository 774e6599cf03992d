"""The loss over a padded vocabulary: its gradient is exact, and nothing copies it on its way."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed_runner import new_job, run_distributed
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from small_runs import small_run
from training_runs import CPU

from patch import compat
from patch.distributed.groups import initialize
from patch.model import LlamaModel, build_llama_model

LENGTH, ROWS = 6, 256
CASES: dict[str, dict[str, Any]] = {
    "no padding": {"dp": 2, "vocab_size": ROWS},
    "padding": {"dp": 2, "vocab_size": ROWS - 6},
    "padding on the last of two ranks": {"tp": 2, "vocab_size": ROWS - 6},
    "nothing but padding on the last of two ranks": {"tp": 2, "vocab_size": 100},
}


def nodes(tensor: torch.Tensor) -> Iterator[str]:
    """Names of the operations that `tensor` came from."""
    stack = [tensor.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None:
            yield node.name()
            stack += [before for before, _ in node.next_functions]


def masked_inside_the_graph(
    model: LlamaModel, labels: torch.Tensor, logits: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """Padding masked by an operation that autograd sees, whose backward sets the gradient there to zero."""
    logits = logits.clone()
    logits[..., vocab_size:] = torch.finfo(logits.dtype).min
    return GPTModel.compute_language_model_loss(model, labels, logits)


def run_losses(rank: int, world_size: int) -> dict[str, Any]:
    found = {}
    for name, changes in CASES.items():
        for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            config = small_run(**changes, precision=precision, make_vocab_size_divisible_by=ROWS)
            compat.apply(cuda=False)
            (model,) = build_llama_model(config.model, initialize(config, CPU), CPU.device, config.execution)
            torch.manual_seed(0)
            whole = torch.randn(LENGTH, 2, ROWS).to(dtype) * 5
            labels = torch.randint(0, config.model.vocab_size, (2, LENGTH))
            weight = torch.rand(2, LENGTH)
            own = whole.chunk(changes.get("tp", 1), dim=-1)[rank if "tp" in changes else 0]

            leaves = [own.clone().requires_grad_() for _ in range(2)]
            loss = model.compute_language_model_loss(labels, leaves[0] * 1)
            known = set(nodes(loss))
            (loss * weight).sum().backward()
            expected = masked_inside_the_graph(model, labels, leaves[1], model.num_vocab_rows)
            (expected * weight).sum().backward()

            oracle = whole.float().requires_grad_()
            flat = oracle[..., : config.model.vocab_size].transpose(0, 1).flatten(0, 1)
            plain = F.cross_entropy(flat, labels.flatten(), reduction="none").view(2, LENGTH)
            (plain * weight).sum().backward()
            gradient = leaves[0].grad
            if "tp" in changes:
                gradient = gather_from_tensor_model_parallel_region(gradient)
            torch.testing.assert_close(loss, plain)
            torch.testing.assert_close(gradient, oracle.grad.to(dtype))
            found[name, precision] = {
                "nodes": known,
                "same loss": torch.equal(loss, expected),
                "same gradient": torch.equal(
                    leaves[0].grad.view(torch.uint8), leaves[1].grad.view(torch.uint8)
                ),
            }
            new_job()
    return found


@pytest.fixture(scope="module")
def losses() -> list[dict[str, Any]]:
    return run_distributed(run_losses, 2)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_the_gradient_of_all_logits_is_not_copied(losses: list, case: str, precision: str) -> None:
    """Writing to a part of the logits is a node whose backward copies their whole gradient: 2 GiB at 8k."""
    for rank in losses:
        assert not [node for node in rank[case, precision]["nodes"] if "CopySlices" in node]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_padding_changes_no_bit_of_loss_and_gradient(losses: list, case: str, precision: str) -> None:
    for rank in losses:
        assert rank[case, precision]["same loss"] and rank[case, precision]["same gradient"]
