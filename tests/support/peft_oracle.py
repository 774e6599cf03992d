"""Adapters that PEFT itself builds beside the tensors of a folder: one linear layer for each of its matrices.

So experts are as transformers 4 had them, for which transformers 5 has one parameter. `peft` is imported in
functions: a test that uses it skips itself without it.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from patch.families import ModelConfig
from patch.families.adapters import AdapterConfig, write_adapter


class Tree(nn.Module):
    """Modules by name, for the tensors of a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        tensors = load_file(folder / "model.safetensors")
        for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].dim()):
            *path, last, _ = name.split(".")
            parent: nn.Module = self
            for part in path:
                if part not in parent._modules:
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            is_linear = tensor.dim() == 2 and "embed" not in name
            if last not in parent._modules:
                parent.add_module(
                    last, nn.Linear(*reversed(tensor.shape), bias=False) if is_linear else nn.Module()
                )
            module = parent.get_submodule(last)
            module.register_parameter(name.rpartition(".")[2], nn.Parameter(tensor))


def peft_model(folder: Path, model: ModelConfig, adapter: AdapterConfig) -> Any:
    """PEFT's model with such adapters beside the folder's tensors, and random values in all of them."""
    from peft import LoraConfig, get_peft_model

    described = write_adapter(model, adapter, None)
    taken = ("r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules")
    found = get_peft_model(Tree(folder), LoraConfig(**{key: described[key] for key in taken}))
    torch.manual_seed(1)
    for name, parameter in found.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1)
    return found
