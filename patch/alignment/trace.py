"""Where two models first part: hooks on every operation that both have, in the order in which they run.

Operations have transformers' names; what our merged projections give is taken apart again. Values are
compared as soon as they are there, before an addition in place can change them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from patch.model import LlamaModel

Parts = dict[str, torch.Tensor]
"""Operation -> value [S, features] of a prompt."""
Reading = Callable[[Any, Any], Parts]
"""What a module's inputs and output say."""


class Place(NamedTuple):
    """One operation of one model."""

    layer: int | None
    """None outside of layers."""
    operation: str


class FirstDifference(NamedTuple):
    """The first operation whose results differ, and by how much at most."""

    layer: int | None
    operation: str
    max: float


class _Point(NamedTuple):
    layer: int | None
    module: torch.nn.Module
    read: Reading


@torch.no_grad()
def first_difference(
    ours: LlamaModel, theirs: torch.nn.Module, prompt: torch.Tensor
) -> FirstDifference | None:
    """Run both on a prompt [1, S]; None where every operation has the same bits.

    Operations are ordered as transformers runs them.
    """
    device = next(ours.parameters()).device
    expected: dict[Place, torch.Tensor] = {}
    with _watched(_hf_points(theirs), expected.__setitem__):
        theirs(prompt.to(device), use_cache=False)
    differing: dict[Place, float] = {}

    def compare(place: Place, value: torch.Tensor) -> None:
        if not torch.equal(value, expected[place]):
            differing[place] = (value.double() - expected[place].double()).abs().max().item()

    with _watched(_our_points(ours), compare):
        ours(prompt.to(device), None, None)
    first = next((place for place in expected if place in differing), None)
    return None if first is None else FirstDifference(*first, differing[first])


@contextmanager
def _watched(points: Iterator[_Point], tell: Callable[[Place, torch.Tensor], None]) -> Iterator[None]:
    with ExitStack() as stack:
        for point in points:
            handle = point.module.register_forward_hook(_hook(point, tell))
            stack.callback(handle.remove)
        yield


def _hook(point: _Point, tell: Callable[[Place, torch.Tensor], None]) -> Callable[..., None]:
    def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        for operation, value in point.read(inputs, output).items():
            tell(Place(point.layer, operation), value)

    return hook


def _first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def _hf_points(model: Any) -> Iterator[_Point]:
    """In the order in which they run; of transformers' LLaMA, Mistral and Qwen."""

    def result(name: str) -> Reading:
        return lambda inputs, output: {name: _first(output)[0].flatten(1)}

    def both(before: str, after: str) -> Reading:
        return lambda inputs, output: {before: inputs[0][0], after: output[0]}

    body = model.model
    yield _Point(None, body.embed_tokens, result("embed_tokens"))
    yield _Point(None, body.rotary_emb, lambda inputs, output: {"rope": torch.cat(output, -1)[0]})
    for index, layer in enumerate(body.layers):
        attention, mlp = layer.self_attn, layer.mlp
        named = {"input_layernorm": layer.input_layernorm}
        named |= {name: getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj")}
        named |= {name: getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)}
        for name, module in named.items():
            yield _Point(index, module, result(name))
        yield _Point(index, attention.o_proj, both("attention", "o_proj"))
        norm = layer.post_attention_layernorm
        yield _Point(index, norm, both("attention residual", "post_attention_layernorm"))
        yield _Point(index, mlp.gate_proj, result("gate_proj"))
        yield _Point(index, mlp.up_proj, result("up_proj"))
        yield _Point(index, mlp.down_proj, both("swiglu", "down_proj"))
        yield _Point(index, layer, result("mlp residual"))
    yield _Point(None, body.norm, result("norm"))
    yield _Point(None, model.lm_head, result("lm_head"))


def _our_points(model: LlamaModel) -> Iterator[_Point]:
    """The same operations of ours; hidden states are [S, 1, H]."""

    def result(name: str) -> Reading:
        return lambda inputs, output: {name: _first(output)[:, 0].flatten(1)}

    def both(before: str, after: str) -> Reading:
        return lambda inputs, output: {before: inputs[0][:, 0], after: _first(output)[:, 0]}

    dtype = next(model.parameters()).dtype
    embedding = model.embedding.word_embeddings
    yield _Point(None, embedding, lambda inputs, output: {"embed_tokens": output[0]})
    yield _Point(None, model.rotary_pos_emb, lambda inputs, output: {"rope": _cos_sin(output, dtype)})
    for index, layer in enumerate(model.decoder.layers):
        attention, mlp = layer.self_attention, layer.mlp
        yield _Point(index, layer.input_layernorm, result("input_layernorm"))
        yield _Point(index, attention.linear_qkv, _qkv_reading(attention))
        if model.config.qk_layernorm:
            yield _Point(index, attention.q_layernorm, result("q_norm"))
            yield _Point(index, attention.k_layernorm, result("k_norm"))
        yield _Point(index, attention.linear_proj, both("attention", "o_proj"))
        norm = layer.pre_mlp_layernorm
        yield _Point(index, norm, both("attention residual", "post_attention_layernorm"))
        yield _Point(index, mlp.linear_fc1, _gate_up)
        yield _Point(index, mlp.linear_fc2, both("swiglu", "down_proj"))
        yield _Point(index, layer, result("mlp residual"))
    yield _Point(None, model.decoder.final_layernorm, result("norm"))
    rows = model.num_vocab_rows
    yield _Point(None, model.output_layer, lambda inputs, output: {"lm_head": output[0][:, 0, :rows]})


def _cos_sin(angles: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Upstream hands angles [S, 1, 1, D] to each layer, which takes cosine and sine in this type."""
    flat = angles[:, 0, 0]
    return torch.cat((flat.cos(), flat.sin()), dim=-1).to(dtype)


def _gate_up(inputs: Any, output: Any) -> Parts:
    gate, up = output[0][:, 0].chunk(2, dim=-1)
    return {"gate_proj": gate, "up_proj": up}


def _qkv_reading(attention: Any) -> Reading:
    groups, size = attention.num_query_groups_per_partition, attention.hidden_size_per_attention_head
    queries = attention.num_attention_heads_per_partition // groups

    def read(inputs: Any, output: Any) -> Parts:
        heads = output[0][:, 0].unflatten(-1, (groups, queries + 2, size))
        parts = heads.split([queries, 1, 1], dim=2)
        return dict(zip(("q_proj", "k_proj", "v_proj"), (part.flatten(1) for part in parts), strict=True))

    return read
