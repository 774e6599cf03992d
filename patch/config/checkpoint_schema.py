"""The section `checkpoint` of a run: the first weights, and what the run writes where (see `schema.py`).

Imports neither torch nor megatron.
"""

from __future__ import annotations

from dataclasses import dataclass

from patch.config.flag_field import flag


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Where the initial weights come from, and what the run writes where."""

    load: str | None = flag(
        "a Hugging Face folder or org/name, a checkpoint of ours (folder or URL), or none: random weights",
        None,
        none="none",
    )
    output_path: str = flag("the run's folder; the same command again resumes from it")
    save: str | None = flag(
        "the store of the run's checkpoints, such as s3://bucket/run; none: checkpoint/ in the run's folder",
        None,
        none="none",
    )
    save_retry_seconds: float = flag(
        "how long a store that fails is asked again, before a checkpoint is written to the run's folder",
        30.0,
        at_least=0,
    )
    distributed_checkpointing: bool = flag("every rank writes its part of a checkpoint; always so", True)
    save_interval: int = flag("steps between checkpoints; the last step is always saved", 500, at_least=1)
    async_save: bool = flag(
        "training goes on while a checkpoint is written, if host memory has room for a copy",
        True,
    )
    resume_with_changed_data: bool = flag(
        "a resume may change data, seed, length and batch size; it goes on after the consumed samples",
        False,
    )
    save_retain_last: int | None = flag(
        "checkpoints before the last N are removed, except the best; 0: all stay", None, none=0, at_least=0
    )
    save_retain_every: int | None = flag(
        "checkpoints of every N-th step stay; the others go, except the last and the best; 0: all stay",
        None,
        none=0,
        at_least=0,
    )
    save_weights_only_at_end: bool = flag(
        "the checkpoint of the last step has no optimizer states: no longer run can resume from it", False
    )
    export_hf: bool = flag("write the trained model as a Hugging Face folder at the end", False)
    stop_file: str | None = flag(
        "when this file appears, the run saves a checkpoint and ends; default: STOP in the run's folder",
        None,
        none="default",
    )
    log_interval: int = flag("steps between lines of log/metrics.jsonl", 1, at_least=1)
    profile: str | None = flag(
        "START:END: a trace of these steps of each rank in log/traces, for llama-patch timeline and Perfetto",
        None,
        none="none",
    )
