"""A folder of PEFT: read and checked, and merged into the weights that it is beside.

A merged weight is W + scale * (B A), computed in fp32 and rounded once: in fp32 PEFT's `merge_and_unload` to
the bit; of weights in bf16 PEFT rounds the product too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from patch.config.schema import ModelConfig
from patch.convert.hf_config_files import copy_descriptions, model_of
from patch.convert.hf_layout import write_like
from patch.convert.hf_reader import HFFolder, open_checked
from patch.convert.mappings import HFBlock
from patch.convert.target_folder import publish, staging, writing
from patch.errors import ConfigError, ConversionError
from patch.families.adapters import PEFT_PREFIX, AdapterConfig, hf_tensors
from patch.logger import get_logger
from patch.preflight.stored_shape import adapter_at
from patch.preflight.weight_files import check_adapter
from patch.storage.places import StrPath, local_path

_logger = get_logger(__name__)
FactorOf = Callable[[str], torch.Tensor | None]


def adapter_of(folder: StrPath, model: ModelConfig) -> AdapterConfig:
    """The adapters of a model that a folder of PEFT describes.

    Raises:
        ConversionError: there is no adapter_config.json, or what it describes is not supported.
    """
    try:
        return adapter_at(local_path(folder), model)
    except ConfigError as error:
        raise ConversionError(str(error)) from error


def open_adapter(folder: Path, model: ModelConfig, adapter: AdapterConfig) -> HFFolder:
    """Open the weights of a folder of PEFT, and check by their headers that they are all of these adapters.

    Raises:
        ConversionError: the folder cannot be read, or does not fit.
    """
    source = HFFolder(folder, adapter=True)
    check_adapter(source, model, adapter)
    return source


def merged(name: str, weight: torch.Tensor, factor_of: FactorOf, scale: float) -> torch.Tensor:
    """A weight of a model, merged with its adapter if it has one.

    Args:
        name: its Hugging Face name.
        weight: the whole tensor.
        factor_of: A or B by PEFT's name without `base_model.model.`; None where there is none.
        scale: the factor of what an adapter gives.
    Raises:
        ConversionError: a merged value is not finite in the type of the weight.
    """
    module = name.removesuffix(".weight")
    a, b = (factor_of(f"{module}.lora_{each}.weight") for each in "AB")
    if a is None or b is None:
        return weight
    product = b.to(weight.device).float() @ a.to(weight.device).float()
    weight = product.mul_(scale).add_(weight).to(weight.dtype)
    if not weight.isfinite().all():
        kind = str(weight.dtype).removeprefix("torch.")
        raise ConversionError(f"{name} with its adapter has values that are not finite in {kind}")
    return weight


def merge_adapter(
    base: StrPath, adapter: StrPath, target: StrPath, *, overwrite: bool = False,
    chat_template: str | None = None,
) -> None:  # fmt: skip
    """Write a Hugging Face folder with an adapter merged into its weights; each keeps its type.

    Tensor by tensor; on failure the target stays as it was.

    Args:
        base: the Hugging Face folder that the adapter is of.
        adapter: a folder of PEFT.
        target: a folder that does not exist or is empty.
        overwrite: replace a Hugging Face model at `target`.
        chat_template: written in the place of the base's; None: that stays.
    Raises:
        ConversionError: a folder cannot be read or written, or they do not fit each other.
    """
    base, adapter, target = (local_path(each).resolve() for each in (base, adapter, target))
    model = model_of(base)
    config = adapter_of(adapter, model)
    source, factors = open_checked(base, model, None, ""), open_adapter(adapter, model, config)
    known = {tensor.name for tensor in factors.tensors}

    def factor_of(name: str) -> torch.Tensor | None:
        return factors[PEFT_PREFIX + name][:] if PEFT_PREFIX + name in known else None

    dtypes = {tensor: source.dtype_of(tensor.name) for tensor in hf_tensors(model)}
    blocks = (
        HFBlock(name, 0, 0, merged(name, source[name][:], factor_of, config.scale)) for name, _ in dtypes
    )
    with staging(target, [base, adapter], overwrite=overwrite) as partial:
        write_like(base, partial, dtypes, blocks, f"{base.name} with {adapter.name}")
        with writing(partial):
            copy_descriptions(base, partial)
            if isinstance(chat_template, str):  # several ones by name are the base's
                (partial / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
        publish(target)
    _logger.info("Hugging Face folder written: %s", target)
