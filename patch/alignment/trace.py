"""Find the first operation whose results differ between two models, with hooks on their common operations.

Operations have transformers' names. The outputs of our merged projections are split accordingly. Values are
compared inside the hooks, before an in-place addition can change them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from patch.families import Kind, ModelConfig, WeightRow, family_called, traits_of, weight_rows
from patch.model import LlamaModel

Parts = dict[str, torch.Tensor]
"""Operation -> value [S, features]."""
Reading = Callable[[Any, Any], Parts]

_INPUTS = {
    "decoder.layers.*.self_attention.linear_proj.weight": "attention",
    "decoder.layers.*.pre_mlp_layernorm.weight": "attention residual",
    "decoder.layers.*.mlp.linear_fc2.weight": "swiglu",
}
"""Weight of a module whose input is compared too -> name of the operation that produces this input."""


class Operation(NamedTuple):
    """An operation that both models have."""

    layer: int | None
    """Counted from 0, or None outside of the layers."""
    name: str


Listener = Callable[[Operation, torch.Tensor], None]
"""Called with an operation and its value [S, features]."""


class FirstDifference(NamedTuple):
    """The first operation whose results differ, and the largest absolute difference."""

    layer: int | None
    operation: str
    max: float


_Traced = tuple[int | None, torch.nn.Module, Reading]
"""Layer, module, and the function that reads operations from its input and output."""


@torch.no_grad()
def first_difference(
    ours: LlamaModel, theirs: torch.nn.Module, prompt: torch.Tensor, model: ModelConfig
) -> FirstDifference | None:
    """Return the first differing operation, in transformers' order, or None if all results are bit-equal."""
    device = next(ours.parameters()).device
    expected: dict[Operation, torch.Tensor] = {}
    with _hooks_on(_hf_modules(theirs, model, prompt.shape[1]), expected.__setitem__):
        theirs(prompt.to(device), use_cache=False)
    differing: dict[Operation, float] = {}

    def compare(operation: Operation, value: torch.Tensor) -> None:
        if not torch.equal(value, expected[operation]):
            differing[operation] = (value.double() - expected[operation].double()).abs().max().item()

    with _hooks_on(_our_modules(ours, model), compare):
        ours(prompt.to(device), None, None)
    first = next((operation for operation in expected if operation in differing), None)
    return None if first is None else FirstDifference(*first, differing[first])


@contextmanager
def _hooks_on(modules: Iterator[_Traced], listener: Listener) -> Iterator[None]:
    def hook(layer: int | None, read: Reading, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        for name, value in read(inputs, output).items():
            listener(Operation(layer, name), value)

    with ExitStack() as stack:
        for layer, module, read in modules:
            stack.callback(module.register_forward_hook(partial(hook, layer, read)).remove)
        yield


def _first_output(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def _with_bias(output: Any) -> torch.Tensor:
    """Result of one of our modules, with the bias that a linear layer may leave to the next operation."""
    value = _first_output(output)
    return value if value is output or output[1] is None else value + output[1]


def _path(parameter: str, layer: int | None) -> str:
    return parameter.removesuffix(".weight").replace("*", str(layer))


def _operation(tensor: str) -> str:
    return tensor.removesuffix(".weight").rpartition(".")[2]


def _modules(model: ModelConfig) -> Iterator[tuple[WeightRow, int | None]]:
    """Rows and layers of modules that both models have, except embedding, output layer and experts.
    Errors of experts show in the residual after them.
    """
    for row in weight_rows(model):
        if row.part in ("attention", "norm", "mlp") and row.name.endswith(".weight"):
            for layer in row.layers if row.is_per_layer else (None,):
                yield row, layer


def _hf_modules(theirs: Any, model: ModelConfig, length: int) -> Iterator[_Traced]:
    """Operations of transformers' model that our model has too; `length` is that of the prompt."""

    def reading(after: str, before: str | None = None) -> Reading:
        def read(inputs: Any, output: Any) -> Parts:
            given = {} if before is None else {before: inputs[0][0]}
            # DeepSeek's latents are one head, [1, S, features]; Gemma 3's norms get [heads, S, features].
            value = _first_output(output)[0].squeeze(0)
            value = value if value.shape[0] == length else value.transpose(0, 1)
            return given | {after: value.flatten(1)}

        return read

    yield None, theirs.get_input_embeddings(), reading("embed_tokens")
    if _has_one_table(model):
        yield None, theirs.model.rotary_emb, lambda inputs, output: {"rope": _table(output)}
    for row, layer in _modules(model):
        for tensor in row.hf:
            module = theirs.get_submodule(_path(tensor, layer))
            yield layer, module, reading(_operation(tensor), _INPUTS.get(row.name))
    first = next(tensor for row in weight_rows(model) if row.is_per_layer for tensor in row.hf)
    layers = theirs.get_submodule(first.partition(".*")[0])
    for layer in range(model.num_layers):
        yield layer, layers[layer], reading("mlp residual")
    yield None, theirs.get_output_embeddings(), reading("lm_head")


def _our_modules(ours: LlamaModel, model: ModelConfig) -> Iterator[_Traced]:
    """The same operations of our model, whose hidden states are [S, 1, H]."""
    dtype, embedding, num_vocab_rows = next(ours.parameters()).dtype, ours.embedding, ours.num_vocab_rows
    if family_called(model.model_type).scales_embedding:
        yield None, embedding, lambda inputs, output: {"embed_tokens": output[:, 0]}
    else:
        yield None, embedding.word_embeddings, lambda inputs, output: {"embed_tokens": output[0]}
    if _has_one_table(model):
        yield None, ours.rotary_pos_emb, lambda inputs, output: {"rope": _cos_sin(output, dtype)}
    for row, layer in _modules(model):
        yield layer, ours.get_submodule(_path(row.name, layer)), _our_reading(row, ours.config)
    for layer, module in enumerate(ours.decoder.layers):
        yield layer, module, lambda inputs, output: {"mlp residual": _first_output(output)[:, 0]}
    if model.logits_scaling == 1.0:  # else our output layer has scaled inputs
        yield None, ours.output_layer, lambda inputs, output: {"lm_head": output[0][:, 0, :num_vocab_rows]}


def _our_reading(row: WeightRow, config: TransformerConfig) -> Reading:
    """Split a module's result [S, 1, ...] in the same way as its weight into Hugging Face tensors."""
    names, before = [_operation(tensor) for tensor in row.hf], _INPUTS.get(row.name)

    def read(inputs: Any, output: Any) -> Parts:
        value = _with_bias(output)[:, 0].flatten(1)  # norms have heads
        given = {} if before is None else {before: inputs[0][:, 0]}
        match row.kind:
            case Kind.QKV:
                parts = _split_qkv(value, config)
            case Kind.JOINED_QKV:
                parts = [torch.cat(_split_qkv(value, config), dim=-1)]
            case Kind.COLUMN_PARALLEL:
                parts = list(value.flatten(1).chunk(len(names), dim=-1))
            case _:
                parts = [value]
        return given | dict(zip(names, parts, strict=True))

    return read


def _split_qkv(value: torch.Tensor, config: TransformerConfig) -> list[torch.Tensor]:
    """Split [S, Q + K + V], ordered by key/value group, into queries, keys and values."""
    assert config.num_query_groups is not None, "ModelConfig always sets it"
    queries = config.num_attention_heads // config.num_query_groups
    heads = value.unflatten(-1, (config.num_query_groups, queries + 2, config.kv_channels))
    return [part.flatten(1) for part in heads.split([queries, 1, 1], dim=2)]


def _has_one_table(model: ModelConfig) -> bool:
    """Whether all layers have one table of RoPE, which is compared too."""
    has_two = model.rotary_base_local is not None or model.llama_4_scaling_beta is not None
    return traits_of(model).has_rope and not has_two


def _table(output: Any) -> torch.Tensor:
    """Cosine and sine of whole heads, concatenated; DeepSeek's table has complex numbers of half a head."""
    if isinstance(output, tuple):
        return torch.cat(output, -1)[0]
    return torch.cat([part[0] for part in (output.real, output.real, output.imag, output.imag)], -1)


def _cos_sin(table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cosine and sine of whole heads, as our layers use them, from a table [2, S, 1, 1, D / 2]."""
    cos, sin = table[:, :, 0, 0].to(dtype)
    return torch.cat((cos, cos, sin, sin), dim=-1)
