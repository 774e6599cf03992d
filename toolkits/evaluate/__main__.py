"""llama-patch evaluate: scores of lm-evaluation-harness's tasks for a Hugging Face folder or a checkpoint.

    llama-patch evaluate FOLDER --tasks a,b --tasks-path DIR [--limit N] [--json FILE] [-- FLAGS OF A RUN]
    llama-patch evaluate FOLDER --distill-to STORE [--top-k K] [--temperature T] -- FLAGS OF THE STUDENT'S RUN

The second form stores the K likeliest successors of each token, for --distill-from of a student's run.
The model runs in the code of a training run. Flags of a run may follow `--`, for example
--tensor-model-parallel-size 2 --nproc-per-node 4 --precision fp32, --tokenizer-name-or-path for a checkpoint
that records no tokenizer, or --eval-tasks-allow-code.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # a worker finds no packages otherwise
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from patch.launch.worker_process import WorkerExit, announce_end, begin, claim_error_report, failure  # noqa: E402

begin()  # before slow imports and before any thread

from patch.config import RunConfig, read_run, user_message  # noqa: E402
from patch.config.fields import FIELDS, scalar_of, with_values  # noqa: E402
from patch.config.flags import flag_words  # noqa: E402
from patch.device import MachineFacts  # noqa: E402
from patch.errors import ConfigError, PatchError, printable  # noqa: E402
from patch.families import differences  # noqa: E402
from patch.launch import RESOLVED  # noqa: E402
from patch.logger import configure_logging  # noqa: E402
from patch.text import to_float  # noqa: E402
from toolkits._arguments import ArgumentParser, at_dashes, local, output_file, positive, typed  # noqa: E402

_ONE_STEP = (
    "--train-data-path none --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1 --min-lr 1 "
    "--seq-length 1"
)
"""Flags that every run requires, but an evaluation does not use."""
_ROW = 2048
"""Tokens of a packed row of texts."""


def main(argv: list[str]) -> int:
    """Run the command line, or one of its workers; return 0, or the exit code of the error."""
    configure_logging()
    own, run = at_dashes(argv)
    try:
        if own[:1] == [RESOLVED]:
            return _work(read_run(Path(own[1])), own[2:])
        options = _parse(own)
        with tempfile.TemporaryDirectory(prefix="evaluate-") as folder:
            return _start(options, run, Path(folder))
    except PatchError as error:
        if claim_error_report():
            print(f"ERROR {user_message(error)}", file=sys.stderr)
        announce_end(failure(error))
        return error.exit_code
    except KeyboardInterrupt:  # there is nothing to save
        return announce_end(WorkerExit(130))


def _start(options: argparse.Namespace, flags: list[str], folder: Path) -> int:
    """Resolve the evaluation as a run of one step, which is never taken, and start its workers."""
    from patch.checks.rules import RULES
    from patch.launch.launcher import launch
    from patch.plan.resolve import resolve_run
    from patch.preflight.hub_names import fetch_from_hub
    from patch.preflight.parse import parse_args
    from patch.preflight.validate import FILE_RULES, check_data

    if options.distill_to and not any(flag.partition("=")[0] == "--train-data-path" for flag in flags):
        expected = "the data flags of the student's run there (no positions, no --config)"
        raise ConfigError(f"--distill-to: got no --train-data-path after --, expected {expected}")
    machine = MachineFacts.probe()
    own = [*_weights(options.model), *_ONE_STEP.split(), "--output-path", str(folder)]
    if options.tasks:
        own += ["--eval-tasks", options.tasks, "--eval-tasks-limit", str(options.limit)]
        own += ["--eval-tasks-path", options.tasks_path] if options.tasks_path else []
    invocation = parse_args([*own, *flags], os.environ, machine)
    config = invocation.config
    if options.tasks:
        config = with_values(config, seq_length=min(_ROW, config.model.max_position_embeddings))
    if config.training.global_batch_size == 1:
        # Interleaved stages need at least one micro-batch per pipeline rank.
        batch = config.data_parallel_size * config.parallel.pipeline_model_parallel_size
        config = with_values(config, global_batch_size=batch * config.training.micro_batch_size)
    for rule in (*RULES, *FILE_RULES):
        rule(config, machine)
    config, _ = resolve_run(fetch_from_hub(config, weights=True), machine)
    arguments = ["" if options.json is None else str(options.json.resolve())]
    if options.distill_to:
        check_data(config)
        if not 1 <= options.top_k <= config.model.vocab_size:
            raise ConfigError(f"--top-k: got {options.top_k}, expected 1 to {config.model.vocab_size}")
        arguments = [str(options.distill_to.resolve()), str(options.top_k), str(options.temperature)]
    if "LOCAL_RANK" in os.environ:
        return _work(config, arguments)
    return launch(Path(__file__).resolve(), config, invocation.rendezvous, machine, *arguments)


def _weights(model: str) -> list[str]:
    """Return the flags that load a model: of a run its tokenizer too, of a LoRA run also base and shape."""
    from patch.preflight.model_of_folder import run_behind, shape_at

    run = run_behind(model)
    if run is None:
        return ["--load", model]
    tokenizer, data, load = run.tokenizer_folder, run.data, run.checkpoint.load
    precision = "bf16" if run.training.precision == "fp8" else run.training.precision
    own: dict[str, Any] = {"tokenizer_name_or_path": tokenizer, "load": model, "precision": precision}
    own |= {"chat_template": data.chat_template, "chat_template_kwargs": data.chat_template_kwargs}
    if run.adapter.lora_rank:
        own |= {"load": load, "lora_load": model}
        base = shape_at(load)
        changed = differences(run.model, base.fields if base else {})
        own |= {field: scalar_of(run, field) for field, *_ in changed}
    given = {name: value for name, value in own.items() if value is not None}
    return [word for name, value in given.items() for word in flag_words(FIELDS[name], value)]


def _work(config: RunConfig, arguments: Sequence[str]) -> int:
    """Work as a worker. Rank 0 prints the scores.

    Args:
        arguments: the file of the scores, or ""; or folder, K and temperature of a teacher's store.
    """
    from patch.compat import quick_start

    with quick_start():
        from patch.training.tasks.suite import scores_of_weights
        from patch.training.teacher import write_store

    result, *of_store = arguments
    if of_store:
        top_k, temperature = of_store
        write_store(config, Path(result), int(top_k), float(temperature))
        return 0
    scores = scores_of_weights(config)
    if os.environ["RANK"] != "0":
        return 0
    for name, score in scores.items():
        if not name.endswith("_stderr"):
            error = f" +- {scores[each]:.4f}" if (each := f"{name}_stderr") in scores else ""
            print(f"{printable(name.removeprefix('tasks/')):<40} {score:.4f}{error}")
    if result:
        Path(result).write_text(json.dumps(scores, indent=1) + "\n", encoding="utf-8")
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    usage = "%(prog)s FOLDER --tasks LIST | --distill-to STORE [...] [-- FLAGS OF A RUN]"
    parser = ArgumentParser(prog=typed("python -m toolkits.evaluate"), usage=usage, description=__doc__)
    parser.add_argument("model", metavar="FOLDER", help="a Hugging Face folder or org/name, or a checkpoint")
    work = parser.add_mutually_exclusive_group(required=True)
    work.add_argument("--tasks", metavar="LIST", help="names of tasks, groups, tags: a,b,c")
    work.add_argument("--distill-to", type=_new_folder, metavar="STORE", help="folder for --distill-from")
    parser.add_argument("--tasks-path", metavar="DIR", help="folder of their YAML files [those of lm-eval]")
    parser.add_argument("--limit", type=positive, default=0, metavar="N", help="questions of each [all]")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the scores there")
    parser.add_argument("--top-k", type=positive, default=64, metavar="K", help="tokens [%(default)s]")
    parser.add_argument("--temperature", type=_temperature, default=1.0, metavar="T", help="[%(default)s]")
    options = parser.parse_args(argv)
    of_other = ("tasks_path", "limit", "json") if options.distill_to else ("top_k", "temperature")
    for name in of_other:
        if getattr(options, name) != parser.get_default(name):
            way = "--tasks" if options.distill_to else "--distill-to"
            parser.error(f"--{name.replace('_', '-')} goes with {way}")
    return options


def _new_folder(text: str) -> Path:
    if (folder := local(text)).exists():
        raise argparse.ArgumentTypeError(f"{text} is there already; expected the name of a new folder")
    return folder


def _temperature(text: str) -> float:
    number = to_float(text)
    if number is None or number <= 0:
        raise argparse.ArgumentTypeError(f"got {text}, expected a number above 0")
    return number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
