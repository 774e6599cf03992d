"""Compare every weight of a checkpoint with the Hugging Face folder, bit by bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule

from patch.config.schema import ModelConfig
from patch.convert.hf_reader import HFFolder
from patch.convert.live_weights import mapped_parameters
from patch.preflight.weight_files import check_headers

_BITS = {2: torch.int16, 4: torch.int32}


class WeightDifference(NamedTuple):
    """A Hugging Face tensor that is not bit-equal to its values in the checkpoint."""

    name: str
    what: str
    """The fault, in words that follow the name."""


class WeightComparison(NamedTuple):
    """Result of comparing all weights of a checkpoint with a Hugging Face folder."""

    num_tensors: int
    """Tensors of the folder's model."""
    is_rounded: bool
    """Whether the folder's weights were rounded to the checkpoint's dtype."""
    differences: list[WeightDifference]


def compare_weights(
    stage: LanguageModule, model: ModelConfig, folder: Path, *, is_tied: bool
) -> WeightComparison:
    """Convert the checkpoint's weights to Hugging Face tensors and compare them with the folder's tensors.

    Args:
        stage: the whole model in the stored dtype, to which the folder's weights are rounded.
        is_tied: whether config.json ties the output layer to the embedding.
    Raises:
        ConversionError: the folder cannot be read, or lacks a tensor of its model.
    """
    source = HFFolder(folder)
    check_headers(source, dataclasses.replace(model, untie_embeddings_and_output_weights=not is_tied))
    missing = {tensor.name for tensor in source.tensors}
    differences: list[WeightDifference] = []
    rounded = False
    for weight in mapped_parameters([stage], model, tp_size=1):
        parts = weight.mapping.megatron_to_hf([weight.parameter.cpu()])
        ours = {tensor.name: part for tensor, part in zip(weight.mapping.hf, parts, strict=True)}
        if not missing.issuperset(ours):
            differences += [WeightDifference(name, "is stored, though config.json ties it") for name in ours]
            continue
        theirs = {name: source[name][:] for name in ours}
        dtype = weight.parameter.dtype
        rounded |= dtype != torch.float32 and any(tensor.dtype != dtype for tensor in theirs.values())
        differences += _differences(ours, {name: tensor.to(dtype) for name, tensor in theirs.items()})
        missing -= set(ours)
    differences += [WeightDifference(name, "is not in the checkpoint") for name in sorted(missing)]
    return WeightComparison(len(source.tensors), rounded, differences)


def _differences(
    ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]
) -> list[WeightDifference]:
    return [
        WeightDifference(name, _describe(ours[name], expected, theirs))
        for name, expected in theirs.items()
        if not _is_same(ours[name], expected)
    ]


def _describe(got: torch.Tensor, expected: torch.Tensor, siblings: Mapping[str, torch.Tensor]) -> str:
    """Describe what the checkpoint has in place of `expected`; `siblings` make up the same parameter."""
    for name, other in siblings.items():
        if _is_same(got, other):
            return f"holds the values of {name}"
    if got.ndim == 2 and _is_same(got, expected.t()):
        return "is transposed"
    if torch.equal(_row_hashes(got).sort().values, _row_hashes(expected).sort().values):
        return "holds its rows in another order"
    differing = (_bits(got) != _bits(expected)).nonzero()
    first = tuple(differing[0].tolist())
    return (
        f"differs in {len(differing)} of {got.numel()} values, first at {list(first)}: "
        f"{got[first].item():.9g}, expected {expected[first].item():.9g}"
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Values as integers: NaN equals itself, 0 and -0 differ."""
    return tensor.contiguous().view(_BITS[tensor.element_size()])


def _is_same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and torch.equal(_bits(left), _bits(right))


def _row_hashes(tensor: torch.Tensor) -> torch.Tensor:
    """One integer per row that depends on the row's bits (per value, for a vector)."""
    rows = _bits(tensor).long().view(len(tensor), -1)
    factors = torch.randint(2**62, (rows.shape[1],), generator=torch.Generator().manual_seed(0))
    return (rows * factors).sum(1)
