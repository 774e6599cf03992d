"""Adapters that PEFT itself builds beside the tensors of a folder: one linear layer for each of its matrices.

So experts are as transformers 4 had them, for which transformers 5 has one parameter. `peft` is imported in
functions: a test that uses it skips itself without it.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from training_runs import token_mean

from patch.config.schema import RunConfig
from patch.convert.live_weights import iter_hf_weights
from patch.families import ModelConfig
from patch.families.adapters import AdapterConfig, write_adapter
from patch.optimizer import learning_rate
from patch.training.setup import Run


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


def peft_steps(
    config: RunConfig, folder: Path, factors: dict[str, np.ndarray], num_steps: int
) -> dict[str, Any]:
    """PEFT's model with these factors, and torch's AdamW: losses, norms, first gradients and last factors."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    adapter, model = config.adapter, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    targets: Any = adapter.lora_target_modules
    described = LoraConfig(
        r=adapter.lora_rank, lora_alpha=adapter.alpha, use_rslora=adapter.lora_rslora,
        target_modules=targets if targets == "all-linear" else targets.split(","),
    )  # fmt: skip
    model = get_peft_model(model, described)
    theirs = {
        name.replace("base_model.model.", "").replace(".default", ""): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    assert theirs.keys() == factors.keys()
    for name, parameter in theirs.items():
        parameter.data.copy_(torch.from_numpy(factors[name]))
    optimizer = torch.optim.AdamW(theirs.values(), weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)
    found: dict[str, Any] = {"losses": [], "norms": []}
    for iteration in range(num_steps):
        optimizer.param_groups[0]["lr"] = learning_rate(iteration + 1, num_steps, config.optimizer)
        optimizer.zero_grad()
        loss = token_mean(model, config, iteration)
        loss.backward()
        found["losses"].append(loss.item())
        found["norms"].append(torch.nn.utils.clip_grad_norm_(theirs.values(), 1.0).item())
        optimizer.step()
    return found | {"factors": {name: parameter.detach().numpy() for name, parameter in theirs.items()}}


def factors_of(run: Run) -> dict[str, np.ndarray]:
    weights = iter_hf_weights(run.stages, run.config.model, run.groups, adapter=run.config.adapter)
    return {name: values.float().numpy().copy() for name, values in weights}
