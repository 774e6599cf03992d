"""Adapters that PEFT builds beside the tensors of a folder: one linear layer for each matrix of the folder.

So experts are separate matrices as in transformers 4; transformers 5 has one parameter for them. `peft` is
imported in functions: a test that uses it is skipped without it.
"""

import math
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from training_runs import seeded_batches

from patch.config.schema import RunConfig
from patch.convert.live_weights import iter_hf_weights
from patch.families import ModelConfig
from patch.families.adapters import AdapterConfig, write_adapter
from patch.optimizer import learning_rate
from patch.training.setup import Run


class Tree(nn.Module):
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
    """Return PEFT's model with these adapters beside the folder's tensors, and random values in all."""
    from peft import LoraConfig, get_peft_model

    described = write_adapter(model, adapter, None)
    taken = ("r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules")
    found = get_peft_model(Tree(folder), LoraConfig(**{key: described[key] for key in taken}))
    torch.manual_seed(1)
    for name, parameter in found.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1)
    return found


class WrittenAdamW(torch.optim.Optimizer):
    """AdamW of matrices in the order of operations of patch/optimizer/kernels/spec.py."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Use NumPy's roots: torch's are not rounded to nearest. `is_bf16` rounds weights, ties upwards."""
        for group in self.param_groups:
            beta1, beta2, lr = 0.9, 0.95, group["lr"]
            for weight in group["params"]:
                state, gradient = self.state[weight], weight.grad
                step = state["step"] = state.get("step", 0) + 1
                master = state.setdefault("master", weight.clone()).mul_(1 - lr * 0.1)
                m, v = (state.setdefault(name, torch.zeros_like(weight)) for name in "mv")
                m.copy_(m * beta1 + gradient * (1 - beta1))
                v.copy_(v * beta2 + (gradient * (1 - beta2)) * gradient)
                root = torch.from_numpy(np.sqrt(v.numpy())) / math.sqrt(1 - beta2**step)
                master.sub_((m / (root + 1e-8)) * (lr / (1 - beta1**step)))
                bits = (master.view(torch.int32) + 0x8000 >> 16) << 16
                weight.copy_(bits.view(torch.float32) if group["is_bf16"] else master)


def peft_steps(
    config: RunConfig, folder: Path, factors: dict[str, np.ndarray], num_steps: int
) -> dict[str, Any]:
    """Train PEFT's model with these factors in Hugging Face's Trainer; return losses, norms and last factors.

    An aligned run gives its attention and its order of AdamW; otherwise torch's are used. In bf16 runs,
    weights and autocast are bf16 and factors are float32: the defaults of PEFT and the Trainer.
    """
    from transformers import Trainer, TrainingArguments

    class Recorded(Trainer):
        """Trainer with our learning rate schedule that keeps the loss of each micro-batch."""

        losses: list[float] = []

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            peak = config.optimizer.lr
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                self.optimizer, lambda done: learning_rate(done + 1, num_steps, config.optimizer) / peak
            )
            return self.lr_scheduler

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            self.losses.append(loss.item())
            return loss

    is_bf16, aligned = config.training.precision == "bf16", config.model.precision_align
    model = _with_adapters(config, folder)
    theirs = {
        name.replace("base_model.model.", "").replace(".default", ""): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    assert theirs.keys() == factors.keys()
    for name, parameter in theirs.items():
        parameter.data.copy_(torch.from_numpy(factors[name]))
    size, of_step = config.training.micro_batch_size, config.num_micro_batches
    settings = TrainingArguments(
        str(folder.with_name("trainer")), max_steps=num_steps, per_device_train_batch_size=size,
        gradient_accumulation_steps=of_step, learning_rate=config.optimizer.lr, weight_decay=0.1,
        adam_beta2=0.95, max_grad_norm=1.0, train_sampling_strategy="sequential", use_cpu=True,
        bf16=is_bf16, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
        remove_unused_columns=False,
    )  # fmt: skip
    known = {"lr": config.optimizer.lr, "is_bf16": is_bf16}
    written = WrittenAdamW(theirs.values(), known) if aligned else None
    if config.adapter.lora_plus_ratio:
        written = _faster_b(config, model)
    rows = _rows_of_steps(config, num_steps)
    trainer = Recorded(model, settings, train_dataset=rows, optimizers=(written, None))
    trainer.train()
    losses = np.reshape(trainer.losses, (num_steps, of_step)).sum(axis=1)
    norms = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    last = {name: parameter.detach().numpy() for name, parameter in theirs.items()}
    return {"losses": list(losses), "norms": norms, "factors": last}


def _faster_b(config: RunConfig, model: Any) -> torch.optim.Optimizer:
    from peft.optimizers import create_loraplus_optimizer

    return create_loraplus_optimizer(
        model, torch.optim.AdamW, lr=config.optimizer.lr, loraplus_lr_ratio=config.adapter.lora_plus_ratio,
        loraplus_weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8,
    )  # fmt: skip


def _with_adapters(config: RunConfig, folder: Path) -> Any:
    """Return the folder's model with the run's adapters, initialized by PEFT."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    adapter, aligned = config.adapter, config.model.precision_align
    dtype = torch.bfloat16 if config.training.precision == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=aligned)
    model.set_experts_implementation("eager")
    described = {"target_modules": write_adapter(config.model, adapter, None)["target_modules"]}
    if adapter.lora_target_modules == "all-linear":
        described["target_modules"] = "all-linear"
    rank, alpha, is_root = adapter.lora_rank, adapter.alpha, adapter.lora_rslora
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=alpha, use_rslora=is_root, **described))


def _rows_of_steps(config: RunConfig, num_steps: int) -> list[dict[str, torch.Tensor]]:
    """Return the rows of all steps in order; transformers takes labels that are shifted already."""
    rows = []
    for batch in chain.from_iterable(seeded_batches(config, iteration) for iteration in range(num_steps)):
        labels = batch.labels.where(batch.loss_mask > 0, -100)
        for tokens, learned in zip(batch.tokens, labels, strict=True):
            rows.append({"input_ids": tokens, "labels": learned, "shift_labels": learned})
    return rows


def factors_of(run: Run) -> dict[str, np.ndarray]:
    weights = iter_hf_weights(run.stages, run.config.model, run.groups, adapter=run.config.adapter)
    return {name: values.float().numpy().copy() for name, values in weights}
