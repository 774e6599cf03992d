"""Which layers have experts, a window, RoPE: Megatron-LM's `--moe-layer-freq` and the like, both ways."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

from patch.errors import ConfigError, shown
from patch.families.shape import MOST_LAYERS, ModelConfig
from patch.text import to_int

EVERY_LAYER = "1"


def expert_layers(model: ModelConfig) -> Sequence[int]:
    """Return the numbers of the layers that have experts in place of an MLP.

    Raises:
        ConfigError: `moe_layer_freq` cannot be read, or has another number of layers.
    """
    if not model.num_experts:
        return ()
    if model.moe_layer_freq == EVERY_LAYER:
        return range(model.num_layers)
    return _layers(model.moe_layer_freq, model.num_layers, "moe_layer_freq")


def layers_with_window(model: ModelConfig) -> Sequence[int]:
    """Return the numbers of the layers with the sliding window; errors as for `expert_layers`."""
    if model.window_size is None:
        return ()
    return _kept_layers(model, "window_attn_skip_freq", lists_kept=True)


def layers_with_rope(model: ModelConfig) -> Sequence[int]:
    """Return the numbers of the layers with RoPE; errors as for `expert_layers`."""
    return _kept_layers(model, "no_rope_freq", lists_kept=False)


def _kept_layers(model: ModelConfig, field: str, *, lists_kept: bool) -> Sequence[int]:
    """Return the layers that the field does not skip; `lists_kept`: its list has 1 for those."""
    every, text = range(model.num_layers), getattr(model, field)
    step = to_int(text)
    if text is None or (step is not None and step >= 1):
        return [number for number in every if step is None or (number + 1) % step]
    listed = _layers(text, model.num_layers, field)
    return listed if lists_kept else [number for number in every if number not in listed]


@lru_cache(maxsize=16)
def _layers(text: str, num_layers: int, field: str) -> tuple[int, ...]:
    step, pattern = to_int(text), None
    if step is not None and step >= 1:
        return tuple(range(0, num_layers, step))
    try:
        pattern = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        pass
    if not isinstance(pattern, list) or len(pattern) != num_layers or not any(pattern):
        raise ConfigError(
            f"got {shown(text)}, expected a whole number of 1 or more, or 0 or 1 for each of {num_layers} "
            f"layers, at least one 1, such as [0]*1+[1]*{num_layers - 1}",
            field=field,
        )
    return tuple(number for number, has_experts in enumerate(pattern) if has_experts)


def _value(node: ast.expr) -> list[int] | int:
    """Value of an expression of 0/1 lists, their multiples and sums; longer than MOST_LAYERS is refused."""
    match node:
        case ast.Constant(value=int(number)) if 0 <= number <= MOST_LAYERS:
            return int(number)
        case ast.List(elts=elements):
            flags = [_value(element) for element in elements]
            if all(flag in (0, 1) for flag in flags):
                return [flag for flag in flags if isinstance(flag, int)]
        case ast.BinOp(left=left, op=ast.Add() | ast.Mult() as operation, right=right):
            first, second = _value(left), _value(right)
            if isinstance(operation, ast.Add) and isinstance(first, list) and isinstance(second, list):
                return first + second
            is_multiple = isinstance(first, list) is not isinstance(second, list)
            size, times = (len(each) if isinstance(each, list) else each for each in (first, second))
            if isinstance(operation, ast.Mult) and is_multiple and size * times <= MOST_LAYERS:
                return first * second  # type: ignore[operator]
    raise ValueError(f"no list of layers: {ast.dump(node)}")


def skipped_text(skipped: Sequence[int], listed: Sequence[int], num_layers: int) -> str | None:
    """Return N if every Nth layer is skipped, None if no layer is, else the list with 1 for `listed`."""
    if not skipped:
        return None
    step = skipped[0] + 1
    is_regular = [*skipped] == [*range(step - 1, num_layers, step)]
    return str(step) if is_regular else layers_text(listed, num_layers)


def layers_text(layers: Sequence[int], num_layers: int) -> str:
    """Return the list for these layers, with 1 for each; all layers are EVERY_LAYER."""
    if len(layers) == num_layers:
        return EVERY_LAYER
    flags = groupby(range(num_layers), key=lambda number: int(number in layers))
    return "+".join(f"[{flag}]*{len(list(numbers))}" for flag, numbers in flags)
