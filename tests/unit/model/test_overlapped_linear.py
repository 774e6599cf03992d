"""Linear layers whose messages travel in pieces: the bits of plain products, of upstream's layers, of a run.

The oracle of a layer is torch in one process: products of whole matrices, and sums in the order of ranks.
Layers that add their weight's gradient to the main gradients have the same bits, but for that gradient.
"""

import math
from collections.abc import Iterator
from functools import reduce
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from distributed_runner import run_distributed
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from small_runs import small_run
from torch.utils._python_dispatch import TorchDispatchMode
from training_runs import CPU

from patch import compat
from patch.config.execution import Fp8
from patch.distributed.groups import initialize
from patch.distributed.tensor_group import TensorGroup
from patch.model.eight_bit_product import EightBits, StepWeights
from patch.model.linear import PLAIN, Column, Product, Row, give_product
from patch.model.overlapped_linear import OverlappedColumn, OverlappedRow

UPSTREAM = {Column: ColumnParallelLinear, Row: RowParallelLinear}
DTYPES = (torch.float32, torch.bfloat16)
# Tokens of a TP rank, rows, width of what travels, the other width: one piece; several; uneven ones.
SHAPES = [(8, 2, 48, 64), (32, 2, 1024, 48), (77, 1, 1036, 52)]
WRITTEN_BOUND = {torch.float32: 1e-6, torch.bfloat16: 8e-3}
"""Of a gradient that is not rounded to the weight's type, relative to the largest value of one that is."""
SUM_BOUND = {torch.float32: 3e-6, torch.bfloat16: 2e-2}
"""Of sums in another order than that of ranks, relative to the largest value."""


class Case(NamedTuple):
    """One layer: its class, whether sequences are cut, type, shape, bias."""

    layer: type
    is_cut: bool
    dtype: torch.dtype
    shape: tuple[int, int, int, int]


class Found(NamedTuple):
    """Of one rank: output and gradients."""

    output: torch.Tensor
    of_input: torch.Tensor
    of_weight: torch.Tensor
    of_bias: torch.Tensor | None


def cases() -> Iterator[Case]:
    for layer in (Column, Row):
        for is_cut in (False, True):
            for dtype in DTYPES:
                for shape in SHAPES:
                    yield Case(layer, is_cut, dtype, shape)


class Writer:
    """Collects a weight's gradient in float32, as the optimizer does."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.total = torch.full(weight.shape, torch.nan)
        self._weight = weight

    def open(self) -> tuple[torch.Tensor, bool]:
        return self.total, True

    def stand_in(self) -> torch.Tensor:
        return torch.zeros_like(self._weight)


class Problem:
    """The whole tensors of a case, equal on all ranks, and each rank's parts of them."""

    def __init__(self, case: Case, size: int, *, fits_8_bits: bool = False) -> None:
        torch.manual_seed(7)
        tokens, rows, *_ = case.shape
        self.case, self.size, length = case, size, tokens * size
        is_column = case.layer is Column
        inputs, outputs = self.widths = case.shape[2:] if is_column else case.shape[:1:-1]

        def random(*shape: int) -> torch.Tensor:
            if fits_8_bits:  # and sums are exact in bfloat16, in any order and over any ranks
                return torch.randint(-2, 3, shape).to(case.dtype)
            return torch.randn(shape).mul_(2.0 ** torch.randint(-4, 5, shape)).to(case.dtype)

        self.hidden, self.weight = random(length, rows, inputs), random(outputs, inputs)
        if fits_8_bits:  # the numbers of each rank are twice those of the one before
            self.hidden *= torch.arange(size).repeat_interleave(tokens).exp2().to(case.dtype)[:, None, None]
        self.gradient, self.bias = random(length, rows, outputs), random(outputs) if is_column else None

    def rank(self, rank: int) -> list[Any]:
        """Hidden states, weight, bias and output gradient of a rank."""
        is_column, is_cut = self.case.layer is Column, self.case.is_cut

        def part(tensor: torch.Tensor, dim: int, is_divided: bool = True) -> torch.Tensor:
            return tensor.chunk(self.size, dim)[rank] if is_divided else tensor  # contiguous or not

        if is_column:
            bias = part(self.bias, 0)
            return [part(self.hidden, 0, is_cut), part(self.weight, 0), bias, part(self.gradient, 2)]
        return [part(self.hidden, 2), part(self.weight, 1), None, part(self.gradient, 0, is_cut)]

    def expected(self, rank: int) -> Found:
        """By plain products of whole matrices, and sums over ranks in their order."""
        case = self.case
        if case.layer is Column:
            hidden, (_, weight, bias, gradient) = self.hidden, self.rank(rank)
            output = hidden.flatten(0, 1) @ weight.t() + bias
            parts = [self.rank(other) for other in range(self.size)]
            of_input = reduce(torch.add, [part[3].flatten(0, 1) @ part[1] for part in parts])
            flat = gradient.flatten(0, 1)
            return self._found(output, of_input, flat.t() @ hidden.flatten(0, 1), flat.sum(0), rank)
        gradient, (hidden, weight, _, _) = self.gradient.flatten(0, 1), self.rank(rank)
        parts = [self.rank(other) for other in range(self.size)]
        output = reduce(torch.add, [part[0].flatten(0, 1) @ part[1].t() for part in parts])
        return self._found(output, gradient @ weight, gradient.t() @ hidden.flatten(0, 1), None, rank)

    def _found(self, output: torch.Tensor, of_input: torch.Tensor, *weights: Any) -> Found:
        *weights, rank = weights
        rows, is_column = self.case.shape[1], self.case.layer is Column
        output, of_input = (tensor.unflatten(0, (-1, rows)) for tensor in (output, of_input))
        if self.case.is_cut and is_column:
            of_input = of_input.chunk(self.size)[rank]
        elif self.case.is_cut:
            output = output.chunk(self.size)[rank]
        return Found(output, of_input, *weights)


def run_layer(
    problem: Problem,
    group: Any,
    form: str,
    *,
    is_frozen: bool = False,
    is_written: bool = False,
    multiplied_by: Product = PLAIN,
) -> Found:
    """One forward and backward of this rank's layer.

    By `overlap` or `plain`, in pieces; `around`, with upstream's messages; `upstream`; or `given`, upstream's
    with our product.

    If `is_written`, the weight's gradient is what the layer wrote.
    """
    case, size = problem.case, problem.size
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, params_dtype=case.dtype,
        tensor_model_parallel_size=size, sequence_parallel=case.is_cut, tp_comm_overlap=form == "overlap",
        use_cpu_initialization=True, perform_initialization=False, gradient_accumulation_fusion=False,
    )  # fmt: skip
    hidden, weight, bias, gradient = problem.rank(group.rank())
    ways = {"gather_output": False} if case.layer is Column else {"input_is_parallel": True}
    if form in ("upstream", "given"):
        kind = UPSTREAM[case.layer]
    else:
        kind, ways = case.layer, ways | {"in_pieces": form != "around", "product": multiplied_by}
    layer = kind(
        *problem.widths, config=config, init_method=None, bias=bias is not None,
        skip_bias_add=False, tp_group=group, **ways,
    )  # fmt: skip
    if form == "given":
        give_product(layer, PLAIN)
    layer.weight.data.copy_(weight)
    layer.weight.requires_grad_(not is_frozen)
    if bias is not None:
        layer.bias.data.copy_(bias)
    leaf, writer = hidden.clone().requires_grad_(), Writer(layer.weight)
    if is_written:
        layer.weight.main_grad_writer = writer
    output, _ = layer(leaf)
    output.backward(gradient)
    of_weight = writer.total if is_written else layer.weight.grad
    return Found(output.detach(), leaf.grad, of_weight, None if bias is None else layer.bias.grad)


def compare(one: Found, other: Found) -> list[float]:
    """The largest difference of each tensor, relative to the largest value; 0 for the same bits."""
    found = []
    for mine, theirs in zip(one, other, strict=True):
        if theirs is not None:
            assert mine.shape == theirs.shape
            difference = (mine.double() - theirs.double()).abs().max() / theirs.double().abs().max()
            found.append(0.0 if torch.equal(mine, theirs) else difference.item())
    return found


def run_layers(rank: int, world_size: int) -> dict[str, Any]:
    compat.apply(cuda=False)
    group = initialize(small_run(tp=world_size, num_query_groups=4), CPU).tp
    found: dict[Any, Any] = {}
    for case in cases():
        problem = Problem(case, world_size)
        overlap, plain = (run_layer(problem, group, form) for form in ("overlap", "plain"))
        found[case] = {
            "oracle": compare(overlap, problem.expected(rank)),
            "plain": compare(overlap, plain),
            "upstream": [
                difference
                for form in (["upstream", "around", "given"] if world_size == 2 else [])
                for difference in compare(overlap, run_layer(problem, group, form))
            ],
            "written": [
                compare(run_layer(problem, group, form, is_written=True), overlap)
                for form in (["overlap", "around", "given"] if world_size == 2 else [])
            ],
        }
    frozen = run_layer(problem, group, "overlap", is_frozen=True)
    same = torch.equal(frozen.of_input, overlap.of_input) and torch.equal(frozen.output, overlap.output)
    found["frozen"] = same and frozen.of_weight is None
    found["8 bits"], found["gathered"] = in_8_bits(group), gathered_in_8_bits(group)
    return found


def in_8_bits(group: Any) -> list[float]:
    """Differences to the oracle where the messages around a product bring 8-bit values."""
    found = []
    for layer, is_cut, keeps_input in product((Column, Row), (False, True), (False, True)):
        problem = Problem(Case(layer, is_cut, torch.bfloat16, SHAPES[0]), group.size(), fits_8_bits=True)
        eight_bits = EightBits(StepWeights(Fp8()), keeps_input=keeps_input)
        ours = run_layer(problem, group, "around", multiplied_by=eight_bits)
        found += compare(ours, problem.expected(group.rank()))
    return found


def gathered_in_8_bits(group: Any) -> list[str]:
    """The collectives of a column layer with SP, whose bits are those without, not finite ones too."""
    for odd, keeps in product((1e3, math.nan, -math.inf), (True, False)):
        found = []
        for is_cut in (False, True):
            problem = Problem(Case(Column, is_cut, torch.bfloat16, SHAPES[0]), group.size())
            problem.hidden[-1, 0, 7] = odd  # only the last rank has it
            eight_bits = EightBits(StepWeights(Fp8()), keeps_input=keeps)
            with _Events(events := []):
                ours = run_layer(problem, group, "around", multiplied_by=eight_bits)
            found.append((ours.output, ours.of_weight))
        torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)
        sent = [event for event in events if event != PRODUCT]
    return sent


@pytest.fixture(scope="module", params=[2, 4])
def layers(request: pytest.FixtureRequest) -> list[dict[Any, Any]]:
    return run_distributed(run_layers, request.param)


def test_layers_have_the_bits_of_plain_products(layers: list) -> None:
    """With SP, and at TP=2 in any case: the order of gloo's all-reduce at TP=4 is its own."""
    for rank in layers:
        for case in cases():
            bound = 0.0 if case.is_cut or len(layers) == 2 else SUM_BOUND[case.dtype]
            assert max(rank[case]["oracle"]) <= bound, case


def test_8_bit_products_have_the_messages_of_plain_ones(layers: list) -> None:
    assert not any(any(rank["8 bits"]) for rank in layers)


def test_sequence_parallelism_gathers_8_bits(layers: list) -> None:
    """16 tokens of a rank, 48 numbers each: in forward, and again in backward; the scale is of all ranks'."""
    gather = f"_allgather_base_ {16 * 48}"
    assert all(rank["gathered"] == ["allreduce_ 4", gather, gather] for rank in layers)


def test_overlap_changes_no_bit(layers: list) -> None:
    for rank in layers:
        for case in cases():
            assert not any(rank[case]["plain"] + rank[case]["upstream"]), case


def test_gradients_are_written_to_the_main_gradients(layers: list) -> None:
    for rank in layers:
        for case in cases():
            for output, of_input, of_weight, *of_bias in rank[case]["written"]:
                assert not any([output, of_input, *of_bias]), case
                assert of_weight <= WRITTEN_BOUND[case.dtype], case


def test_a_frozen_weight_gets_no_gradient(layers: list) -> None:
    assert all(rank["frozen"] for rank in layers)


class _Events(TorchDispatchMode):
    """Notes the matrix products, and collectives with the bytes that this rank gives."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self._events = events

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.mm.default, torch.ops.aten.mm.out):
            self._events.append(PRODUCT)
        if function.namespace == "c10d" and "all" in (name := function._opname):
            given = args[0][0] if name == "allreduce_" else args[1]
            self._events.append(f"{name} {given.nbytes}")
        return function(*args, **kwargs or {})


class _Alone(TensorGroup):
    """The first of two ranks, whose messages only are noted."""

    def __init__(self) -> None:
        self.rank, self.size, self.events = 0, 2, []
        self._started = 0

    def _note(self) -> Any:
        name, self._started = f"message {self._started}", self._started + 1
        self.events.append(name)
        return type("", (), {"wait": lambda _: self.events.append(f"wait for {name}")})()

    def start_swap(self, step: int, sent: torch.Tensor, received: torch.Tensor) -> Any:
        return self._note()

    def start_all_reduce(self, buffer: torch.Tensor) -> Any:
        return self._note()


PRODUCT = "product"
GATHER = [
    "message 0", "message 1", PRODUCT, "wait for message 0", PRODUCT, "wait for message 1", PRODUCT,
]  # fmt: skip
SCATTER = [PRODUCT, "message 0", PRODUCT, "message 1", PRODUCT]
REDUCE = [step for number in range(4) for step in (PRODUCT, f"message {number}")]


def _waits(*numbers: int) -> list[str]:
    return [f"wait for message {number}" for number in numbers]


def _later(events: list[str], by: int) -> list[str]:
    """The events, where `by` messages came before."""
    words = [event.rsplit(" ", 1) for event in events]
    return [f"{first} {int(number[0]) + by}" if number else first for first, *number in words]


BACKWARD = ["message 2", "message 3", *_later(SCATTER, 4), *_waits(2, 3), PRODUCT, *_waits(4, 5)]


@pytest.mark.parametrize(
    ("function", "is_cut", "forward", "backward"),
    [
        (OverlappedColumn, True, GATHER, BACKWARD),
        (OverlappedColumn, False, [PRODUCT], [*REDUCE, PRODUCT, *_waits(0, 1, 2, 3)]),
        (OverlappedRow, True, [*SCATTER, *_waits(0, 1)], [*_later(GATHER, 2), PRODUCT]),
        (OverlappedRow, False, [*REDUCE, *_waits(0, 1, 2, 3)], [PRODUCT, PRODUCT]),
    ],
)  # fmt: skip
def test_messages_travel_while_products_are_computed(
    function: Any, is_cut: bool, forward: list[str], backward: list[str]
) -> None:
    """The own rows are computed while the first arrive, and last where others wait for the rest."""
    rows, width = 128, 256
    hidden = torch.randn(
        rows // 2 if is_cut and function is OverlappedColumn else rows, 2, width, requires_grad=True
    )
    weight, group = torch.randn(width, width, requires_grad=True), _Alone()
    bias = [None] if function is OverlappedColumn else []
    with _Events(group.events):
        output = function.apply(hidden, weight, *bias, group, is_cut)
        assert group.events == forward
        group.events.clear()
        output.backward(torch.zeros_like(output))
    assert group.events == backward
