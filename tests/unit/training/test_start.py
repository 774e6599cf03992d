"""Building a run: how much memory the weights take while it is built, and that they are the right ones.

Parameters that an adapter adds get random weights where all others come from a folder, which lacks them.
"""

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from distributed_runner import new_job, run_distributed
from small_runs import hf_llama, small_run
from torch.profiler import profile
from training_runs import CPU, build_stages, digest_of, save

from patch import compat
from patch.convert.live_weights import iter_hf_weights
from patch.distributed.groups import initialize
from patch.model import build_llama_model, initialize_weights
from patch.training.objectives.objective import Objective
from patch.training.run_state import Progress
from patch.training.setup import Run, RunData, _load, build_model, build_run_optimizer

LARGE = {
    "hidden_size": 256, "ffn_hidden_size": 1024, "vocab_size": 2000, "kv_channels": 64, "precision": "bf16",
}  # fmt: skip


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
    plain = build_llama_model(config, groups, CPU.device)
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


def run_loading(rank: int, world_size: int, folder: Path) -> list[dict[str, np.ndarray]]:
    """A model's weights from nothing, from a Hugging Face folder, and from a checkpoint without adapters."""
    found = []
    for load, is_adapted in ((None, True), ("hf", False), ("hf", True), ("checkpoint", True)):
        config = small_run(load=str(folder / load) if load else None, lora_rank=3 * is_adapted)
        groups, stages = build_stages(config)
        optimizer = build_run_optimizer(stages, config, groups)
        run = Run(config, CPU.device, groups, stages, optimizer, RunData(Objective(config), None, {}))
        _load(run, folder, None)
        if not is_adapted:
            save(folder, Progress(1, 1), run, weights_only=True)
            (folder / "iter_0000001").rename(folder / "checkpoint")
        names = [name for name, _ in iter_hf_weights(stages, config.model, groups)]
        assert len(names) == len({*names}) and not any("adapter" in name for name in names)
        found.append({name: weight.detach().numpy().copy() for name, weight in stages[0].named_parameters()})
        new_job()
    return found


def test_what_an_adapter_adds_is_initialised_where_the_other_weights_are_loaded(tmp_path: Path) -> None:
    hf_llama(small_run(), tmp_path / "hf")
    ((random, plain, *loaded),) = run_distributed(run_loading, 1, tmp_path)
    names = random.keys() - plain.keys()
    assert len(names) == 2 * 7 * 4
    for name in names:
        largest = 0 if "lora_B" in name else random[name].shape[1] ** -0.5  # PEFT's
        assert 0.9 * largest <= abs(random[name]).max() <= largest
    for weights in loaded:
        assert all(np.array_equal(weights.pop(name), random[name]) for name in names)
        assert weights.keys() == plain.keys() and all(np.array_equal(weights[n], plain[n]) for n in plain)
