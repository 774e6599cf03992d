"""Linear layers with TP communication in chunks: the bits of plain products, of upstream's layers, of a run.

The oracle of a layer is torch in one process: products of whole matrices, and sums in the order of ranks.
Layers that add their weight's gradient to the main gradients have the same bits, but for that gradient.
"""

import math
from functools import reduce
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from distributed_runner import run_distributed
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from small_runs import small_run
from torch.utils._python_dispatch import TorchDispatchMode
from training_runs import CPU
from triton_interpreter import give_writer

from patch import compat
from patch.distributed.groups import initialize
from patch.distributed.tensor_group import TensorGroup
from patch.model.fp8.product import Fp8Product, StepWeights
from patch.model.linear import PLAIN, Column, Product, Row
from patch.model.overlapped_linear import OverlappedColumn, OverlappedRow

UPSTREAM = {Column: ColumnParallelLinear, Row: RowParallelLinear}
DTYPES = (torch.float32, torch.bfloat16)
# Tokens of a TP rank, rows, width of the messages, the other width: one chunk; several; uneven ones.
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


CASES = [Case(*values) for values in product((Column, Row), (False, True), DTYPES, SHAPES)]


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
    problem: Problem, group: Any, form: str, *,
    is_frozen: bool = False, is_written: bool = False, multiplied_by: Product = PLAIN,
) -> Found:  # fmt: skip
    """One forward and backward of this rank's layer.

    By `overlap` or `plain`, in pieces; `around`, with upstream's messages; or `upstream`.

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
    ways |= {"bias": bias is not None, "skip_bias_add": False, "tp_group": group, "init_method": None}
    kind = UPSTREAM[case.layer] if form == "upstream" else case.layer
    if kind is case.layer:
        ways |= {"in_pieces": form != "around", "product": multiplied_by}
    layer = kind(*problem.widths, config=config, **ways)
    layer.weight.data.copy_(weight)
    layer.weight.requires_grad_(not is_frozen)
    if bias is not None:
        layer.bias.data.copy_(bias)
    leaf, total = hidden.clone().requires_grad_(), torch.full(layer.weight.shape, torch.nan)
    if is_written:
        give_writer(layer.weight, total)
    output, _ = layer(leaf)
    output.backward(gradient)
    of_weight = total if is_written else layer.weight.grad
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
    for case in CASES:
        problem = Problem(case, world_size)
        overlap, plain = (run_layer(problem, group, form) for form in ("overlap", "plain"))
        found[case] = {"oracle": compare(overlap, problem.expected(rank)), "plain": compare(overlap, plain)}
        found[case] |= {"upstream": [], "written": []}
        for form in ("upstream", "overlap", "around") if world_size == 2 else ():
            if form != "overlap":
                found[case]["upstream"] += compare(overlap, run_layer(problem, group, form))
            if form != "upstream":
                written = run_layer(problem, group, form, is_written=True)
                found[case]["written"].append(compare(written, overlap))
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
        eight_bits = Fp8Product(StepWeights(), keeps_input=keeps_input)
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
            eight_bits = Fp8Product(StepWeights(), keeps_input=keeps)
            with _Events(events := []):
                ours = run_layer(problem, group, "around", multiplied_by=eight_bits)
            found.append((ours.output, ours.of_weight))
        torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)
        sent = [event for event in events if event != PRODUCT]
    return sent


@pytest.fixture(scope="module", params=[2, 4])
def layers(request: pytest.FixtureRequest) -> list[dict[Any, Any]]:
    return run_distributed(run_layers, request.param)


@pytest.mark.long
def test_layers_have_the_bits_of_plain_products_and_write_to_the_main_gradients(layers: list) -> None:
    """With SP, and at TP=2 in any case: the order of gloo's all-reduce at TP=4 is its own."""
    for rank, case in product(layers, CASES):
        found = rank[case]
        bound = 0.0 if case.is_cut or len(layers) == 2 else SUM_BOUND[case.dtype]
        assert max(found["oracle"]) <= bound, case
        assert not any(found["plain"] + found["upstream"]), case
        for output, of_input, of_weight, *of_bias in found["written"]:
            assert not any([output, of_input, *of_bias]), case
            assert of_weight <= WRITTEN_BOUND[case.dtype], case
    assert all(rank["frozen"] for rank in layers)


@pytest.mark.long
def test_8_bit_products_have_the_messages_of_plain_ones_and_sp_gathers_8_bits(layers: list) -> None:
    """16 tokens of a rank, 48 numbers each: in forward, and again in backward; the scale is of all ranks'."""
    gather = f"_allgather_base_ {16 * 48}"
    for rank in layers:
        assert not any(rank["8 bits"])
        assert rank["gathered"] == ["allreduce_ 4", gather, gather]


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
        number, self._started = self._started, self._started + 1
        self.events.append(f"m{number}")
        return SimpleNamespace(wait=lambda: self.events.append(f"w{number}"))

    def start_swap(self, step: int, sent: torch.Tensor, received: torch.Tensor) -> Any:
        return self._note()

    def start_all_reduce(self, buffer: torch.Tensor) -> Any:
        return self._note()


PRODUCT = "P"
EVENTS = [
    (OverlappedColumn, True, "m0 m1 P w0 P w1 P", "m2 m3 P m4 P m5 P w2 w3 P w4 w5"),
    (OverlappedColumn, False, "P", "P m0 P m1 P m2 P m3 P w0 w1 w2 w3"),
    (OverlappedRow, True, "P m0 P m1 P w0 w1", "m2 m3 P w2 P w3 P P"),
    (OverlappedRow, False, "P m0 P m1 P m2 P m3 w0 w1 w2 w3", "P P"),
]
"""Function, whether sequences are cut, and the products, messages and waits of forward and of backward."""


@pytest.mark.parametrize(("function", "is_cut", "forward", "backward"), EVENTS)
def test_messages_travel_while_products_are_computed(function, is_cut, forward, backward) -> None:
    """The own rows are computed while the first arrive, and last where others wait for the rest."""
    width, is_column = 256, function is OverlappedColumn
    hidden = torch.randn(64 if is_cut and is_column else 128, 2, width, requires_grad=True)
    weight, group = torch.randn(width, width, requires_grad=True), _Alone()
    bias = [None] if is_column else []
    with _Events(group.events):
        output = function.apply(hidden, weight, *bias, group, is_cut)
        assert group.events == forward.split()
        group.events.clear()
        output.backward(torch.zeros_like(output))
    assert group.events == backward.split()
