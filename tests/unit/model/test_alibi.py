"""ALiBi against its definition in float64, whole and packed, in a window, cut over CP and TP; its slopes."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from thread_group import ThreadGroup, run_ranks
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes

from patch.distributed.context_group import Zigzag
from patch.families import ALIBI_POSITIONS
from patch.families.bloom import BLOOM
from patch.model import PackedSequences
from patch.model.attention.alibi import AlibiAttention, slopes
from patch.model.attention.context_parallel import ContextParallelAttention
from patch.model.attention.core_attention import CausalAttention

HEADS, HEAD_SIZE, ROWS, LENGTH = 6, 12, 2, 48
BORDERS = [0, 7, 8, 20, 24, 48, 96]
"""Of two rows: sequences within a chunk of CP, over chunks and ranks, and one that fills a row."""
BOUND = 5e-6
"""Of numbers near 1: slopes are float32, whose products with positions up to 48 are added to scores."""


def _by_definition(inputs: list[torch.Tensor], borders: list[int], window: int | None) -> torch.Tensor:
    """[S, B, N * D] of q, k and v [S, B, N, D]: scores of a sequence less slope x distance."""
    query, key, value = (tensor.transpose(0, 1).flatten(0, 1) for tensor in inputs)
    found = []
    for begin, end in pairwise(borders):
        part = slice(begin, end)
        distance = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
        scores = torch.einsum("qnd,knd->nqk", query[part], key[part]) * HEAD_SIZE**-0.5
        scores = scores - slopes(HEADS).double()[:, None, None] * distance
        unseen = (distance < 0) | (distance >= (window or end))
        weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
        found.append(torch.einsum("nqk,knd->qnd", weights, value[part]))
    return torch.cat(found).unflatten(0, inputs[0].shape[1::-1]).transpose(0, 1).flatten(2)


def _group(rank: int, size: int) -> Any:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def _attention(window: int | None, cp: Any = None, tp: Any = None, **how: Any) -> AlibiAttention:
    window_size = window and (window - 1, 0)
    return AlibiAttention(
        config=SimpleNamespace(kv_channels=HEAD_SIZE, num_attention_heads=HEADS, window_size=window_size),
        attention=ContextParallelAttention if cp else CausalAttention, layer_number=1,
        num_channels=BLOOM.traits.position_channels, attn_mask_type=AttnMaskType.causal,
        attention_type="self", pg_collection=SimpleNamespace(cp=cp or _group(0, 1), tp=tp or _group(0, 1)),
        **how,
    )  # fmt: skip


def _inputs() -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    inputs = torch.randn(3, LENGTH, ROWS, HEADS, HEAD_SIZE, dtype=torch.float64).unbind(0)
    return [tensor.requires_grad_() for tensor in inputs], torch.randn(LENGTH, ROWS, HEADS * HEAD_SIZE)


def _packed(borders: list[int] | None, zigzag: Zigzag) -> PackedSequences | None:
    cu_seqlens = None if borders is None else torch.tensor(borders, dtype=torch.int32)
    return PackedSequences.of(
        cu_seqlens, torch.empty(ROWS, LENGTH // zigzag.size), torch.device("cpu"), zigzag
    )


@pytest.mark.parametrize("borders", [None, BORDERS])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("way", "size"), [("", 1), ("p2p", 2), ("p2p", 4), ("a2a", 3)])
def test_outputs_and_gradients_are_those_of_the_definition(way, size, window, borders) -> None:
    inputs, direction = _inputs()
    expected = _by_definition(inputs, borders or [0, LENGTH, 2 * LENGTH], window)
    gradients = torch.autograd.grad((expected * direction).sum(), inputs)

    def rank(group: ThreadGroup) -> list[torch.Tensor]:
        zigzag = group.zigzag
        own = [zigzag.cut(tensor.detach(), 0).requires_grad_() for tensor in inputs]
        if way:
            attention = _attention(window, cp=_group(*zigzag), cp_comm_type=way)
            attention.attention.group = group
        else:
            attention = _attention(window)
        context = attention(*own, None, packed_seq_params=_packed(borders, zigzag))
        found = [context, *torch.autograd.grad((context * zigzag.cut(direction, 0)).sum(), own)]
        return found

    for number, ours in enumerate(run_ranks(size, rank)):
        for mine, whole in zip(ours, [expected, *gradients], strict=True):
            part = Zigzag(number, size).cut(whole, 0)
            torch.testing.assert_close(mine, part, rtol=0, atol=BOUND)


def test_each_rank_of_tp_has_the_slopes_of_its_heads() -> None:
    inputs, _ = _inputs()
    whole = _attention(None)(*inputs, None)
    for rank in range(3):
        part = slice(2 * rank, 2 * rank + 2)
        context = _attention(None, tp=_group(rank, 3))(*(tensor[:, :, part] for tensor in inputs), None)
        torch.testing.assert_close(context, whole.unflatten(2, (HEADS, -1))[:, :, part].flatten(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_beyond_256_count_whole(dtype: torch.dtype) -> None:
    """In bf16 plain numbers would be multiples of 4 there; ours rounds probabilities and values alone."""
    torch.manual_seed(0)
    inputs = list(torch.randn(3, 700, 1, HEADS, HEAD_SIZE).to(dtype).unbind(0))
    expected = _by_definition([tensor.double() for tensor in inputs], [0, 700], None)
    bound = 1e-4 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(_attention(None)(*inputs, None).double(), expected, rtol=0, atol=bound)


def test_slopes_are_those_of_transformers_to_the_bit() -> None:
    for num_heads in range(1, 129):
        assert torch.equal(slopes(num_heads), _get_alibi_slopes(num_heads, torch.device("cpu"))), num_heads


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_channels_of_16_bits_have_every_position_and_slope(dtype: torch.dtype) -> None:
    """Plain numbers of bf16 would be wrong by 2^-9 of slope and position, at 65,535 by up to 128."""
    attention, positions = _attention(None), torch.arange(ALIBI_POSITIONS)[:, None]
    of_heads = attention._of_heads(torch.empty(0, dtype=dtype)).to(dtype).double()
    of_positions = attention._of_positions(positions).to(dtype).double()[:, 0, 0]
    bias = of_positions @ of_heads.t() * attention.attention.scale
    expected = positions * slopes(HEADS).double()
    rounded = -19 if dtype == torch.float16 else -22  # the third parts of small slopes are below its range
    torch.testing.assert_close(bias, expected, rtol=2.0**rounded, atol=0)
