"""Context-parallel attention against transformers' eager attention in float64: outputs and gradients."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from small_runs import small_run
from thread_group import ThreadGroup, run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from patch.distributed.context_group import Zigzag
from patch.model import PackedSequences
from patch.model.attention.context_parallel import ContextParallelAttention
from patch.model.backends import failing_kernels
from patch.plan.resolve import resolve_cp_comm_type
from patch.plan.timing.communication import sent_bytes

HEAD_SIZE, ROWS, LENGTH = 12, 2, 48
BOUND = 1e-12
"""Outputs and gradients are near 1, in float64."""
BORDERS = [0, 7, 8, 20, 24, 48, 96]
"""Of two rows of 48 tokens: sequences within a chunk, over chunks and ranks, and one that fills a row."""


def _visible(borders: list[int], window: int | None) -> torch.Tensor:
    """[B, S, S] bool: which tokens of its row a token sees."""
    tokens = torch.arange(ROWS * LENGTH)
    number = torch.bucketize(tokens, torch.tensor(borders[1:-1]), right=True).view(ROWS, LENGTH)
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)[None]
    seen = (distance >= 0) & (distance < (window or LENGTH))
    return seen & (number[:, :, None] == number[:, None, :])


def _plain(inputs: list[torch.Tensor], visible: torch.Tensor) -> torch.Tensor:
    """Attention by its definition, of [S, B, heads, D]; [S, B, N * D] out."""
    query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in inputs)
    key, value = (heads.repeat_interleave(query.shape[1] // heads.shape[1], 1) for heads in (key, value))
    scores = (query @ key.transpose(2, 3)) * HEAD_SIZE**-0.5
    weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
    return (weights @ value).permute(2, 0, 1, 3).flatten(2)


def _attention(group: ThreadGroup, way: str, window: int | None) -> ContextParallelAttention:
    attention = ContextParallelAttention(
        config=SimpleNamespace(kv_channels=HEAD_SIZE, window_size=window and (window - 1, 0)), layer_number=1,
        attn_mask_type=AttnMaskType.causal, attention_type="self", cp_comm_type=way,
        pg_collection=SimpleNamespace(cp=SimpleNamespace(rank=lambda: 0, size=lambda: 1)),
    )  # fmt: skip
    attention.group = group
    return attention


def _cut_inputs(inputs: list[torch.Tensor], zigzag: Zigzag) -> list[torch.Tensor]:
    return [zigzag.cut(tensor.detach(), 0).requires_grad_() for tensor in inputs]


def _packed(zigzag: Zigzag, borders: list[int] | None) -> PackedSequences | None:
    cu_seqlens = None if borders is None else torch.tensor(borders, dtype=torch.int32)
    part = torch.empty(ROWS, LENGTH // zigzag.size)
    return PackedSequences.of(cu_seqlens, part, torch.device("cpu"), zigzag)


WAYS = [("p2p", 2), ("p2p", 3), ("p2p", 4), ("a2a", 2), ("a2a", 3)]


@pytest.mark.parametrize(("way", "size"), WAYS)
@pytest.mark.parametrize(("heads", "groups"), [(6, 6), (6, 2)])
@pytest.mark.parametrize("window", [None, 1, 20, 48])
@pytest.mark.parametrize("borders", [None, BORDERS])
def test_outputs_and_gradients_are_those_of_whole_rows(way, size, heads, groups, window, borders) -> None:
    torch.manual_seed(0)
    shapes = [(LENGTH, ROWS, count, HEAD_SIZE) for count in (heads, groups, groups)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    direction = torch.randn(LENGTH, ROWS, heads * HEAD_SIZE, dtype=torch.float64)
    expected = _plain(inputs, _visible(borders or [0, LENGTH, 2 * LENGTH], window))
    gradients = torch.autograd.grad((expected * direction).sum(), inputs)

    def rank(group: ThreadGroup) -> list[torch.Tensor]:
        own = _cut_inputs(inputs, group.zigzag)
        attention = _attention(group, way, window)
        context = attention(*own, None, packed_seq_params=_packed(group.zigzag, borders))
        return [context, *torch.autograd.grad((context * group.zigzag.cut(direction, 0)).sum(), own)]

    for number, ours in enumerate(run_ranks(size, rank)):
        for mine, whole in zip(ours, [expected, *gradients], strict=True):
            torch.testing.assert_close(mine, Zigzag(number, size).cut(whole, 0), rtol=0, atol=BOUND)


class _Kernels(TorchDispatchMode):
    """Notes the calls of attention kernels."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self._events, self.shapes = events, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "attention" in str(function):
            self._events.append("attend")
            self.shapes.append(list(args[0].shape))
        return function(*args, **kwargs or {})


def test_the_rings_kernel_is_tried_with_the_tokens_and_heads_of_a_rank() -> None:
    config = SimpleNamespace(
        kv_channels=HEAD_SIZE, window_size=None, params_dtype=torch.float32, num_attention_heads=8,
        num_query_groups=4, tensor_model_parallel_size=2, context_parallel_size=3,
    )  # fmt: skip
    with _Kernels([]) as kernels:
        assert not failing_kernels(
            ("flash", "cudnn"), config, LENGTH, HEAD_SIZE, torch.device("cpu"), is_ring=True
        )
    assert kernels.shapes == [[1, 4, LENGTH // 3, HEAD_SIZE]] * 2, "cuDNN alone, forward and backward"


def test_messages_of_the_ring_travel_while_attention_is_computed() -> None:
    inputs = list(torch.randn(3, LENGTH, ROWS, 2, HEAD_SIZE).unbind(0))

    def rank(group: ThreadGroup) -> tuple[list[str], list[str]]:
        own = _cut_inputs(inputs, group.zigzag)
        with _Kernels(group.events):
            context = _attention(group, "p2p", None)(*own, None)
            forward, group.events[:] = list(group.events), []
            context.sum().backward()
        return forward, group.events

    for forward, backward in run_ranks(3, rank):
        assert forward == ["start 0", "attend", "wait 0", "start 1", "attend", "wait 1", "attend"]
        assert sum(event == "attend" for event in backward) == 3
        numbers = [event.split()[1] for event in backward if event.startswith("start")]
        assert len(numbers) == 4, "two pieces and two gradients"
        for number in numbers:
            begin, end = backward.index(f"start {number}"), backward.index(f"wait {number}")
            assert "attend" in backward[begin:end], number


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("way", "size", "heads", "groups"), [
    ("p2p", 2, 6, 2), ("p2p", 4, 6, 2), ("a2a", 3, 6, 6), ("a2a", 3, 6, 2), ("a2a", 2, 6, 2),
])  # fmt: skip
def test_the_plan_says_what_a_rank_sends(precision, way, size, heads, groups) -> None:
    config = small_run(
        cp=size, cp_comm_type=way, precision=precision, num_attention_heads=heads, num_query_groups=groups,
        kv_channels=HEAD_SIZE, micro_batch_size=ROWS, max_padding_length=LENGTH,
    )  # fmt: skip
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    inputs = [torch.randn(LENGTH, ROWS, count, HEAD_SIZE, dtype=dtype) for count in (heads, groups, groups)]

    def rank(group: ThreadGroup) -> int:
        _attention(group, way, None)(*_cut_inputs(inputs, group.zigzag), None).sum().backward()
        return group.num_sent_bytes

    assert run_ranks(size, rank) == [sent_bytes(config, way)] * size


@pytest.mark.parametrize(
    ("changes", "way"),
    [
        ({"num_query_groups": 1}, "p2p"),
        ({"num_query_groups": 4, "cp": 4}, "a2a"),
        ({"num_query_groups": 1, "packing": True}, "a2a"),
        ({"num_query_groups": 1, "window_size": "7,0"}, "a2a"),
        ({"tp": 2, "cp": 4, "packing": True}, "p2p"),
        ({"num_query_groups": 1, "cp_comm_type": "a2a"}, "a2a"),
        ({"cp": 1}, None),
    ],
)
def test_auto_chooses_by_shape(changes: dict, way: str | None) -> None:
    config = small_run(**{"cp": 2} | changes)
    resolved, lines = resolve_cp_comm_type(config)
    assert resolved.parallel.cp_comm_type == way
    assert resolve_cp_comm_type(resolved) == (resolved, [])
    assert bool(lines) == (resolved is not config)
    for line in lines:
        assert line.startswith("--cp-comm-type auto: ") and line.endswith(f"{way} is chosen")
