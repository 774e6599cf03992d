"""Times the training step of one contender of `cuda_graphs` in its own process.

python -m toolkits.benchmarks._graph_step_run '{"contender": "local", ...}'    the fields of Task, as JSON
"""

from __future__ import annotations

import json
import sys
from typing import Any

from patch.config.schema import RunConfig
from toolkits.benchmarks._child import StepsTask
from toolkits.benchmarks._gpu_step_run import measure
from toolkits.benchmarks._run_config import llama, run_config

MICRO_BATCHES = 8
CONTENDERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({}, {}),
    "none, sums by autograd": ({}, {"gradient_accumulation_fusion": False}),
    "local": ({"cuda_graph_impl": "local"}, {}),
}
"""By name: fields of the model and of the optimizer. Graphs leave sums of gradients to autograd, too."""


class Task(StepsTask):
    """The work of the process."""


def graph_run(contender: str, layers: int, sequence: int) -> RunConfig:
    """Layers of LLaMA-3.2 1B in bf16; micro-batches of one sequence."""
    of_model, of_optimizer = CONTENDERS[contender]
    model = llama(
        sequence, num_layers=layers, hidden_size=2048, ffn_hidden_size=8192, num_attention_heads=32,
        num_query_groups=8, kv_channels=64, vocab_size=128256, transformer_impl="local", **of_model,
    )  # fmt: skip
    return run_config(model, optimizer=of_optimizer, precision="bf16", global_batch_size=MICRO_BATCHES)


if __name__ == "__main__":
    task = Task(**json.loads(sys.argv[1]))
    print(json.dumps(measure(graph_run(task.contender, task.layers, task.sequence), task.steps)))
