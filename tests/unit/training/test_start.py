"""Building a run: how much memory the weights take while it is built, and that they are the right ones."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from distributed_runner import run_distributed
from small_runs import small_run
from torch.profiler import profile
from training_runs import CPU, digest_of

from patch import compat
from patch.distributed.groups import initialize
from patch.model import build_llama_model, initialize_weights
from patch.training.setup import build_model

LARGE = {
    "hidden_size": 256,
    "ffn_hidden_size": 1024,
    "vocab_size": 2000,
    "kv_channels": 64,
    "precision": "bf16",
}


def allocations(work: Callable[[], Any]) -> tuple[list[int], Any]:
    """Bytes that tensors took (and, below 0, gave back) in `work`, in their order, and what it returned."""
    with profile(profile_memory=True) as profiler:
        result = work()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())], result


def run_building(rank: int, world_size: int) -> dict[str, Any]:
    config = small_run(**LARGE)
    compat.apply(cuda=False)
    groups = initialize(config, CPU)
    sizes, (stages, optimizer) = allocations(lambda: build_model(config, groups, CPU.device))
    before_gradients = sizes[: sizes.index(optimizer.grad_buffer.num_bytes)]
    initialize_weights(stages, config.model, config.training.seed)
    plain = build_llama_model(config.model, groups, CPU.device, config.execution)
    initialize_weights(plain, config.model, config.training.seed)
    ours, expected = (
        digest_of(p for stage in built for p in stage.parameters()) for built in (stages, plain)
    )
    return {
        "peak": max(accumulate(before_gradients)),
        "weights": sum(parameter.nbytes for parameter in plain[0].parameters()),
        "is equal": ours == expected,
    }


def test_weights_are_never_held_twice() -> None:
    """They were copied into the flat buffer: at the start 2 x 16 GB of 8B, half of it given up in pieces."""
    (found,) = run_distributed(run_building, 1)
    assert found["is equal"]
    assert found["peak"] < 1.01 * found["weights"], found
