"""Sections `data` and `checkpoint` of a run (see `schema.py`). Imports neither torch nor megatron."""

from __future__ import annotations

from dataclasses import dataclass

from patch.config.choices import DatasetType, InputJoin, LongSamples, PushAs, TokenizerType, TrainOn
from patch.flag_field import flag


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Data set, tokenizer and evaluation."""

    dataset_type: DatasetType = flag(
        "idxmap: .bin/.idx for pre-training, or Pai-Megatron-Patch's for --sft; raw: JSON rows (with --sft)",
        "idxmap",
    )
    train_data_path: str = flag(
        "raw: a file, folder or glob of JSON, JSONL, CSV, .gz, .zst, parquet or Arrow; idxmap: path prefix "
        "of .bin/.idx; several: 'WEIGHT PATH WEIGHT PATH ...' or 'PATH PATH ...'"
    )
    valid_data_path: str | None = flag("the same for evaluation; none: no evaluation", none="none")
    max_padding_length: int = flag("raw samples are padded and truncated to this many tokens", at_least=1)
    tokenizer_type: TokenizerType = flag("where the tokenizer comes from", "PretrainedFromHF")
    tokenizer_name_or_path: str | None = flag(
        "folder of a Hugging Face tokenizer, or org/name; none: that of --load", none="none", is_path=True
    )
    columns: str | None = flag(
        "rename keys of the rows, OURS=THEIRS, such as instruction=question,output=answer; none",
        none="none",
    )
    alpaca_input_join: InputJoin = flag(
        "between alpaca's instruction and input: newline, or empty as Pai-Megatron-Patch has it", "newline"
    )
    chat_template: str | None = flag(
        "chatml, llama3, alpaca, plain, or a .jinja file; none: the tokenizer's own", none="none"
    )
    chat_template_kwargs: str | None = flag(
        "variables of the chat template as JSON, such as '{\"enable_thinking\": false}'; none", none="none"
    )
    train_on: TrainOn = flag("turns of the assistant that are learned", "all")
    allow_special_tokens: bool = flag(
        "encode special tokens in a row's text as special tokens, not as text", False
    )
    long_samples: LongSamples = flag(
        "raw samples over --max-padding-length are cut at an end, split, or dropped", "cut-end"
    )
    max_dropped_share: float = flag(
        "the run stops if a larger share of a set's rows is dropped", 0.1, at_least=0, at_most=1
    )
    packing: bool = flag("several raw samples in one sequence of --max-padding-length tokens", False)
    cache_dir: str | None = flag(
        "folder of tokenized sets, shared by runs; default: llama-megatron-patch in the user's cache folder",
        none="default",
    )
    data_workers: int | None = flag(
        "processes that tokenize on each machine; 0: one for each core", none=0, at_most=1000
    )
    data_prefetch: int = flag(
        "steps whose batches are read ahead in the background; 0: none", 2, at_least=0, at_most=1000
    )
    split: str | None = flag(
        "idxmap: shares of each set's documents for training, validation and neither, such as 99,1,0; none: "
        "all of them for training",
        none="none",
    )
    reset_position_ids: bool = flag(
        "idxmap: positions start again after each end of document; with --reset-attention-mask", False
    )
    reset_attention_mask: bool = flag("idxmap: no attention over an end of document", False)
    eod_mask_loss: bool = flag("idxmap: mask the loss where the input is an end-of-document token", False)
    distill_from: str | None = flag(
        "learn from a teacher whose log-probabilities llama-patch evaluate --distill-to wrote here; none",
        none="none",
        is_path=True,
    )
    distill_alpha: float = flag(
        "--distill-from: share of the divergence from the teacher in the loss; the rest is cross entropy",
        0.5,
        above=0,
        at_most=1,
    )
    distill_temperature: float = flag(
        "--distill-from: temperature at which teacher and student are compared, that of the folder",
        1.0,
        above=0,
    )
    eval_interval: int | None = flag("steps between evaluations; 0: none", 100, none=0)
    eval_iters: int | None = flag("most global batches of one evaluation of a set; 0: the whole set", none=0)
    eval_tasks: str | None = flag(
        "score the model on these tasks of lm-eval before the first step and after the last one: names of "
        "tasks, groups or tags, a,b,c",
        none="none",
    )
    eval_tasks_path: str | None = flag(
        "folder with the tasks' YAML files; none: lm-eval's tasks, with data in Hugging Face's cache",
        none="none",
        is_path=True,
    )
    eval_tasks_interval: int | None = flag(
        "steps between scores; 0: only before the first step and after the last one", none=0
    )
    eval_tasks_limit: int | None = flag("the first N questions of each task; 0: all", none=0)
    eval_tasks_allow_code: bool = flag(
        "trust --eval-tasks-path: run its !function, accept every key", False
    )
    eval_tasks_num_fewshot: int | None = flag(
        "examples before each question, except for tasks that say 0; -1: as each task says", none=-1
    )
    eval_tasks_apply_chat_template: bool = flag("ask through the run's chat template", False)
    eval_tasks_fewshot_as_multiturn: bool = flag(
        "with --eval-tasks-apply-chat-template: an example is two messages; off: part of the question's", True
    )
    eval_tasks_system_instruction: str | None = flag("the system message, or text before all", none="none")

    @property
    def tasks(self) -> list[str]:
        """The names in `eval_tasks`."""
        return _names(self.eval_tasks)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Where the initial weights come from, and what the run writes where."""

    load: str | None = flag(
        "a Hugging Face folder or org/name, a checkpoint of ours (folder or URL), or none: random weights",
        none="none",
        is_path=True,
    )
    output_path: str = flag("the run's folder; the same command again resumes from it", is_path=True)
    save: str | None = flag(
        "the store of the run's checkpoints, such as s3://bucket/run; none: checkpoint/ in the run's folder",
        none="none",
    )
    distributed_checkpointing: bool = flag(
        "every rank writes its part of a checkpoint; always so (refused yet: --no-distributed-checkpointing)",
        True,
    )
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
        "keep only the last N checkpoints and the best one; 0: keep all", none=0
    )
    save_retain_every: int | None = flag(
        "keep only checkpoints of every N-th step, the last one and the best one; 0: keep all",
        none=0,
    )
    metric_for_best_model: str | None = flag(
        "TASK/METRIC of --eval-tasks that chooses the best checkpoint; valid_loss: the validation loss",
        none="valid_loss",
    )
    save_weights_only_at_end: bool = flag(
        "the checkpoint of the last step has no optimizer states: no longer run can resume from it", False
    )
    export_hf: bool = flag("write the trained model as a Hugging Face folder at the end", False)
    push_to_hub: str | None = flag(
        "ORG/NAME: the exported model (--export-hf) is uploaded to this repository of the hub", none="none"
    )
    push_to_hub_as: PushAs = flag(
        "create a private or public repository, or update an existing repository", "private"
    )
    stop_file: str | None = flag(
        "when this file appears, the run saves a checkpoint and ends; default: STOP in the run's folder",
        none="default",
    )
    log_interval: int = flag("steps between lines of log/metrics.jsonl", 1, at_least=1)
    profile: str | None = flag(
        "START:END: a trace of these steps of each rank in log/traces, for Perfetto",
        none="none",
    )
    report_to: str | None = flag(
        "services that get the metrics: some of wandb, mlflow, swanlab, trackio, separated by commas",
        none="none",
    )

    @property
    def services(self) -> list[str]:
        """The names in `report_to`, without duplicates."""
        return list(dict.fromkeys(_names(self.report_to)))


def _names(text: str | None) -> list[str]:
    return [name for name in map(str.strip, (text or "").split(",")) if name]
