"""Golden runs: training, reading and converting in 1 and in 2 processes, and the recorded results."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from distributed_runner import new_job
from golden.machine import machine_key
from hf_families import family_model, family_run
from llama3_tokenizer import build_tiny_tokenizer, tiny_tokenizer
from small_runs import small_run
from training_runs import CPU, build_seeded_run, digests, stored_tensors, train_run

from patch.config.schema import RunConfig
from patch.convert import export_hf, hf_to_mcore, mcore_to_hf
from patch.data import BatchReader
from patch.data.pretraining.preprocess import write_indexed
from patch.distributed.groups import initialize
from patch.training.guards.phases import PhaseClock
from patch.training.setup import Run, build_run

STEPS = {"train_iters": 5, "eval_iters": 1, "reduce_bucket_size": 9000}
BF16 = {"precision": "bf16"}
FOUR_ROWS_EACH = {"dp": 2, "global_batch_size": 8}
OFFLOAD = {"optimizer_offload_chunk_size": 1999}
ALONE: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": BF16,
    "fp16": {"precision": "fp16", "initial_loss_scale": 2.0**19, "loss_scale_window": 2},
    "full recomputation": BF16 | {"recompute_granularity": "full"},
    "tied": {"untie_embeddings_and_output_weights": False},
    "aligned": BF16 | {"precision_align": "eager"},
    "bf16 gradients": BF16 | {"main_grads_dtype": "bf16"},
    "static 0.5": BF16 | OFFLOAD | {"optimizer_offload_policy": "static", "optimizer_offload_fraction": 0.5},
    "auto": BF16
    | OFFLOAD
    | {"optimizer_offload_policy": "auto", "optimizer_offload_auto_threshold": 4096}
    | {"simulated_device_memory": 4_000_000},
}
"""Runs in one process. fp16's scale overflows in step 3; auto's device holds about half of the states."""
TOGETHER: dict[str, dict[str, Any]] = {
    "dp=2 none": FOUR_ROWS_EACH | {"data_parallel_sharding": "none"},
    "dp=2 optimizer": FOUR_ROWS_EACH | {"data_parallel_sharding": "optimizer"} | BF16,
    "dp=2 gradients": FOUR_ROWS_EACH | {"data_parallel_sharding": "gradients"} | BF16,
    "tp=2": {"tp": 2},
    "tp=2 sp": {"tp": 2, "sequence_parallel": True} | BF16,
    "pp=2": {"pp": 2} | BF16,
    "pp=2 interleaved": {"pp": 2, "stage": 1},
    "pp=2 uneven, tied": {"pp": 2, "num_layers": 3, "untie_embeddings_and_output_weights": False},
}
DATA: dict[str, dict[str, Any]] = {
    f"dp=2 {kind}": {"dp": 2, "vocab_size": 400, "dataset_type": kind, "sft": kind == "raw"}
    for kind in ("raw", "idxmap")
}
"""Runs through `build_run`, from data files and a tokenizer."""
ROWS = [
    {"instruction": "what is two plus two?", "output": "four"},
    {"instruction": "hello", "input": "the lazy dog", "output": "the quick brown fox \u4f60\u597d\n\n1234"},
    {"messages": [
        {"role": "system", "content": "answer yes or no"},
        {"role": "user", "content": "yes?"}, {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "no?"}, {"role": "assistant", "content": "no, over the lazy dog"},
    ]},
    {"instruction": "count", "output": "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20"},
    {"instruction": "question", "output": "answer world"},
]  # fmt: skip
"""Rows of five lengths: padded, cut, with several turns."""
DOCUMENTS = [
    "the quick brown fox jumps over the lazy dog",
    "what is two plus two?\n\nfour.",
    "1234 5678 " * 9,
]


def sha256(parts: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    values = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)}".encode() + values


def measure(run: Run) -> dict[str, Any]:
    """Train a run; return its results. The last loss is that of the validation set."""
    results = train_run(run)
    weights, states = digests(run)
    new_job()
    return {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results[:-1]],
        "skipped": [result.skipped for result in results[:-1]],
        "weights": weights,
        "states": states,
    }


def of_seeds(changes: dict[str, Any]) -> dict[str, Any]:
    return measure(build_seeded_run(small_run(**STEPS | changes)))


def measure_alone(rank: int, world_size: int) -> dict[str, Any]:
    """Return this machine's key, and the results of the runs in one process."""
    return {"key": machine_key(), "runs": {name: of_seeds(changes) for name, changes in ALONE.items()}}


def measure_together(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Return this rank's results in two processes, and hashes that are equal on every machine."""
    runs = {name: of_seeds(changes) for name, changes in TOGETHER.items()}
    found = {}
    for name, changes in DATA.items():
        kind = changes["dataset_type"]
        config = _with_data(folder, changes)
        run = build_run(config, CPU, initialize(config, CPU), PhaseClock())
        (valid_reader,) = run.data.valid_readers.values()
        found[f"{kind} training batches"] = _of_batches(run.data.train_reader, 3)
        found[f"{kind} validation batches"] = _of_batches(valid_reader, len(valid_reader))
        runs[name] = measure(run)
    found["export at tp=2"] = _export(folder / "hf", folder / "export")
    return {"runs": runs, "bytes": found}


def _with_data(folder: Path, changes: dict[str, Any]) -> RunConfig:
    kind = changes["dataset_type"]
    path = str(folder / {"raw": "rows.json", "idxmap": "documents"}[kind])
    return small_run(
        **STEPS, **changes, train_data_path=path, valid_data_path=path,
        tokenizer_name_or_path=str(folder / "tokenizer"), output_path=str(folder / f"run of {kind}"),
    )  # fmt: skip


def _of_batches(reader: BatchReader, num_steps: int) -> str:
    steps = [reader.step(iteration) for iteration in range(num_steps)]
    fields = ("tokens", "labels", "loss_mask")
    return sha256(tensor_bytes(getattr(batch, name)) for step in steps for batch in step for name in fields)


def _export(source: Path, target: Path) -> str:
    """Export a Hugging Face folder from a running model at TP=2; return its digest."""
    run = build_seeded_run(family_run(source, tp=2), source)
    export_hf(run.stages, target, run.config.model, run.groups, hf_source=source, tokenizer=tiny_tokenizer())
    torch.distributed.barrier()
    found = of_files(target, "*.safetensors")
    new_job()
    return found


def write_sources(folder: Path) -> None:
    """Write data, tokenizer and weights with the same bytes on every machine."""
    build_tiny_tokenizer(folder / "tokenizer")
    (folder / "rows.json").write_text(json.dumps(ROWS))
    (folder / "documents.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    write_indexed(
        [folder / "documents.jsonl"], tiny_tokenizer(), {"text": str(folder / "documents")}, append_eod=True
    )  # fmt: skip
    model, numbers = family_model("llama-3"), np.random.RandomState(0)
    for parameter in model.state_dict().values():
        values = numbers.randint(-(2**23), 2**23, parameter.shape) / 2**27
        parameter.copy_(torch.from_numpy(values))
    model.save_pretrained(folder / "hf", max_shard_size="60KB")


def convert(folder: Path) -> dict[str, str]:
    """Convert the weights in `folder` both ways, and build the pre-training set; return digests."""
    hf_to_mcore(folder / "hf", folder / "mcore", torch.bfloat16)
    mcore_to_hf(folder / "mcore", folder / "back")
    stored = stored_tensors(folder / "mcore" / "release")
    return {
        "documents.bin and .idx": of_files(folder, "documents.[bi][id][nx]"),
        "hf2mcore": sha256(name.encode() + tensor_bytes(stored[name]) for name in sorted(stored)),
        "mcore2hf": of_files(folder / "back", "*.safetensors"),
    }


def of_files(folder: Path, pattern: str) -> str:
    return sha256(path.name.encode() + path.read_bytes() for path in sorted(folder.glob(pattern)))
