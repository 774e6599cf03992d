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


class Operation(NamedTuple):
    """An operation that both models have."""

    layer: int | None
    """Counted from 0; None outside of layers."""
    name: str
    """As transformers names it."""


Listener = Callable[[Operation, torch.Tensor], None]
"""Gets the value of an operation, [S, features]."""


class FirstDifference(NamedTuple):
    """The first operation whose results differ, and by how much at most."""

    layer: int | None
    operation: str
    max: float


class _TracedModule(NamedTuple):
    """A module whose inputs and outputs are read, and how."""

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
    expected: dict[Operation, torch.Tensor] = {}
    with _hooks_on(_hf_modules(theirs), expected.__setitem__):
        theirs(prompt.to(device), use_cache=False)
    differing: dict[Operation, float] = {}

    def compare(operation: Operation, value: torch.Tensor) -> None:
        if not torch.equal(value, expected[operation]):
            differing[operation] = (value.double() - expected[operation].double()).abs().max().item()

    with _hooks_on(_our_modules(ours), compare):
        ours(prompt.to(device), None, None)
    first = next((operation for operation in expected if operation in differing), None)
    return None if first is None else FirstDifference(*first, differing[first])


@contextmanager
def _hooks_on(modules: Iterator[_TracedModule], tell: Listener) -> Iterator[None]:
    with ExitStack() as stack:
        for traced in modules:
            handle = traced.module.register_forward_hook(_hook(traced, tell))
            stack.callback(handle.remove)
        yield


def _hook(traced: _TracedModule, tell: Listener) -> Callable[..., None]:
    def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        for name, value in traced.read(inputs, output).items():
            tell(Operation(traced.layer, name), value)

    return hook


def _first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def _hf_modules(model: Any) -> Iterator[_TracedModule]:
    """In the order in which they run; of transformers' LLaMA, Mistral and Qwen."""

    def result(name: str) -> Reading:
        return lambda inputs, output: {name: _first(output)[0].flatten(1)}

    def both(before: str, after: str) -> Reading:
        return lambda inputs, output: {before: inputs[0][0], after: output[0]}

    body = model.model
    yield _TracedModule(None, body.embed_tokens, result("embed_tokens"))
    yield _TracedModule(None, body.rotary_emb, lambda inputs, output: {"rope": torch.cat(output, -1)[0]})
    for index, layer in enumerate(body.layers):
        attention, mlp = layer.self_attn, layer.mlp
        named = {"input_layernorm": layer.input_layernorm}
        named |= {name: getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj")}
        named |= {name: getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)}
        for name, module in named.items():
            yield _TracedModule(index, module, result(name))
        yield _TracedModule(index, attention.o_proj, both("attention", "o_proj"))
        norm = layer.post_attention_layernorm
        yield _TracedModule(index, norm, both("attention residual", "post_attention_layernorm"))
        yield _TracedModule(index, mlp.gate_proj, result("gate_proj"))
        yield _TracedModule(index, mlp.up_proj, result("up_proj"))
        yield _TracedModule(index, mlp.down_proj, both("swiglu", "down_proj"))
        yield _TracedModule(index, layer, result("mlp residual"))
    yield _TracedModule(None, body.norm, result("norm"))
    yield _TracedModule(None, model.lm_head, result("lm_head"))


def _our_modules(model: LlamaModel) -> Iterator[_TracedModule]:
    """The same operations of ours; hidden states are [S, 1, H]."""

    def result(name: str) -> Reading:
        return lambda inputs, output: {name: _first(output)[:, 0].flatten(1)}

    def both(before: str, after: str) -> Reading:
        return lambda inputs, output: {before: inputs[0][:, 0], after: _first(output)[:, 0]}

    dtype = next(model.parameters()).dtype
    embedding = model.embedding.word_embeddings
    yield _TracedModule(None, embedding, lambda inputs, output: {"embed_tokens": output[0]})
    yield _TracedModule(None, model.rotary_pos_emb, lambda inputs, output: {"rope": _cos_sin(output, dtype)})
    for index, layer in enumerate(model.decoder.layers):
        attention, mlp = layer.self_attention, layer.mlp
        yield _TracedModule(index, layer.input_layernorm, result("input_layernorm"))
        yield _TracedModule(index, attention.linear_qkv, _qkv_reading(attention))
        if model.config.qk_layernorm:
            yield _TracedModule(index, attention.q_layernorm, result("q_norm"))
            yield _TracedModule(index, attention.k_layernorm, result("k_norm"))
        yield _TracedModule(index, attention.linear_proj, both("attention", "o_proj"))
        norm = layer.pre_mlp_layernorm
        yield _TracedModule(index, norm, both("attention residual", "post_attention_layernorm"))
        yield _TracedModule(index, mlp.linear_fc1, _gate_up)
        yield _TracedModule(index, mlp.linear_fc2, both("swiglu", "down_proj"))
        yield _TracedModule(index, layer, result("mlp residual"))
    yield _TracedModule(None, model.decoder.final_layernorm, result("norm"))
    rows = model.num_vocab_rows
    yield _TracedModule(None, model.output_layer, lambda inputs, output: {"lm_head": output[0][:, 0, :rows]})


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
