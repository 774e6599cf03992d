"""Freezes the weights of a stage that --freeze and --train-only leave out."""

from __future__ import annotations

import re
from typing import Any

from patch.config.schema import RunConfig
from patch.families.selection import trained_rows
from patch.families.weights import table_name


def freeze_weights(stage: Any, run: RunConfig) -> None:
    """Freeze the weights of a stage (LlamaModel) that a run does not train; call it before the optimizer.

    A frozen weight gets no gradient, and the optimizer keeps no states of it.
    """
    layers_of = {row.name: row.layers for row in trained_rows(run.model, run.selection)}
    ends = ((0, *each) for each in stage.named_parameters() if not each[0].startswith("decoder.layers."))
    of_layers = (
        (layer.layer_number - 1, f"decoder.layers.*.{name}", parameter)
        for layer in stage.decoder.layers
        for name, parameter in layer.named_parameters()
    )
    for number, name, parameter in (*ends, *of_layers):
        key = table_name(re.sub(r"local_experts\.\d+", "local_experts.#", name))
        parameter.requires_grad_(number in layers_of.get(key, ()))
    let_inputs_have_gradients(stage, run)


def let_inputs_have_gradients(stage: Any, run: RunConfig) -> None:
    """Let the output of a frozen embedding require a gradient if layers are recomputed.

    Recomputed layers give their weights gradients only if their input requires one.
    """
    if stage.pre_process and run.recompute is not None:
        stage.embedding.register_forward_hook(lambda embedding, inputs, output: output.requires_grad_())
