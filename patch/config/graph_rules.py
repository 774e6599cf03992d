"""The rules of CUDA graphs (`--cuda-graph-impl`), as those in rules.py.

A graph repeats its launches with the same addresses and sizes. So what decides on the host during a layer
is refused; what merely has another shape is computed without the graph (patch/model/cuda_graphs.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from patch.config.backends import no_transformer_engine
from patch.config.fields import scalar_of
from patch.config.positions import where
from patch.config.refusal import refuse
from patch.config.schema import RunConfig
from patch.device import MachineFacts

_DIFFER = "the borders of its sequences differ from row to row"
_MESSAGES = "messages between ranks would be part of a graph"
_SEVERAL = "a graph has memory for one micro-batch, a pipeline has several under way"
_PLAIN = {
    "tensor_model_parallel_size": ("1", _MESSAGES),
    "context_parallel_size": ("1", _MESSAGES),
    "pipeline_model_parallel_size": ("1", _SEVERAL),
    "recompute_granularity": ("none", "what backward recomputes is not captured"),
    "cpu_offloading": ("false", "a graph's activations stay where they are"),
    "optimizer_offload_policy": ("false", "its threads use the GPU beside a graph, which nobody has tried"),
    "packing": ("false", _DIFFER),
    "reset_attention_mask": ("false", _DIFFER),
    "window_size": ("none", "the kernel of windows gets borders from the host"),
    "precision_align": ("none", "transformers' operations are not captured"),
    "gradient_accumulation_fusion": (
        "auto or false",
        "a layer asks in each backward where it is to add",
    ),
}
"""Fields with the words that they may have, and why no other."""


def graphs_fit(config: RunConfig, machine: MachineFacts) -> None:
    """Graphs are asked for where a layer has the same launches in every micro-batch."""
    if config.model.cuda_graph_impl is None:
        return
    if not machine.cuda_devices:
        refuse("cuda_graph_impl", "local", "none", "this machine has no GPU")
    for field, (plain, why) in _PLAIN.items():
        got = str(scalar_of(config, field)).lower()
        if got not in plain.split(" or "):
            refuse(field, got, f"{plain} beside {_flag()}", why)
    if config.training.precision == "fp8":
        why = "8-bit weights are made once a step, which a graph does not know of"
        refuse("precision", "fp8", f"bf16, fp16 or fp32 beside {_flag()}", why)
    if config.model.transformer_impl != "local" and not no_transformer_engine(config, machine):
        wish = scalar_of(config, "transformer_impl")
        refuse("transformer_impl", wish, f"local beside {_flag()}", "only our own layers are captured")


def graph_notes(config: RunConfig) -> Iterator[str]:
    """Memory that the plan does not count."""
    if config.model.cuda_graph_impl is not None:
        yield (
            f"{_flag()}: graphs keep one more gradient of each layer's weights, in the weights' type, and "
            "the activations of a micro-batch between steps too, which the memory plan does not count"
        )


def _flag() -> str:
    return f"{where('cuda_graph_impl')} local"
