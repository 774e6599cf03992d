"""llama-patch evaluate: scores of lm-evaluation-harness's tasks, of a Hugging Face folder or a checkpoint.

    llama-patch evaluate FOLDER --tasks a,b --tasks-path DIR [--limit N] [--json FILE] [-- FLAGS OF A RUN]

The model is computed by the code of a run. After `--` follow flags of one, such as
--tensor-model-parallel-size 2 --nproc-per-node 4 --precision fp32, --tokenizer-name-or-path for a checkpoint
that knows none, or --eval-tasks-allow-code.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path

if __name__ == "__main__":  # a worker, which has no other way to the packages
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from patch.distributed.worker_process import Reply, announce_end, begin, claim_error_report, failure  # noqa: E402

begin()  # before anything that takes time or starts threads

from patch.config import RunConfig, read_run, to_yaml, user_message  # noqa: E402
from patch.config.fields import FIELDS, scalar_of  # noqa: E402
from patch.config.flags import flag_words  # noqa: E402
from patch.device import MachineFacts  # noqa: E402
from patch.errors import PatchError  # noqa: E402
from patch.families import differences  # noqa: E402
from patch.logger import configure_logging  # noqa: E402
from patch.storage.places import any_path  # noqa: E402
from toolkits._arguments import ArgumentParser, at_dashes, output_file, positive, typed  # noqa: E402
from toolkits.train import RESOLVED  # noqa: E402

_ONE_STEP = (
    "--train-data-path none --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1 --min-lr 1 "
    "--seq-length 1"
)
"""What a run must say and an evaluation does not need."""
_ROW = 2048
"""Tokens of a row of several texts."""


def main(argv: list[str]) -> int:
    """Run the command line, or one of its workers; returns 0, or the exit code of the error."""
    configure_logging()
    own, run = at_dashes(argv)
    try:
        if own[:1] == [RESOLVED]:
            return _evaluate(read_run(Path(own[1])), own[2])
        options = _parse(own)
        with tempfile.TemporaryDirectory(prefix="evaluate-") as folder, _weights(options.model) as weights:
            return _start(options, [*weights, *run], Path(folder))
    except PatchError as error:
        if claim_error_report():
            print(f"ERROR {user_message(error)}", file=sys.stderr)
        announce_end(failure(error))
        return error.exit_code
    except KeyboardInterrupt:  # there is nothing to save
        return announce_end(Reply(130))


def _start(options: argparse.Namespace, flags: list[str], folder: Path) -> int:
    """Resolve the evaluation as a run of one step that is never made, and start its workers."""
    from patch.checks.rules import RULES
    from patch.distributed.launch import launch
    from patch.plan.resolve import resolve_run
    from patch.preflight.hub_names import fetch_from_hub
    from patch.preflight.parse import parse_args
    from patch.preflight.validate import FILE_RULES

    machine = MachineFacts.probe()
    own = ["--eval-tasks", options.tasks, *_ONE_STEP.split()]
    own += ["--output-path", str(folder), "--eval-tasks-limit", str(options.limit)]
    own += ["--eval-tasks-path", options.tasks_path] if options.tasks_path else []
    invocation = parse_args([*own, *flags], os.environ, machine)
    config = invocation.config
    # As many micro-batches as interleaved stages need.
    batch = config.data_parallel_size * config.parallel.pipeline_model_parallel_size
    model = replace(config.model, seq_length=min(_ROW, config.model.max_position_embeddings))
    config = replace(config, model=model, training=replace(config.training, global_batch_size=batch))
    for rule in (*RULES, *FILE_RULES):
        rule(config, machine)
    config, _ = resolve_run(fetch_from_hub(config, weights=True), machine)
    result = "" if options.json is None else str(options.json.resolve())
    if "LOCAL_RANK" in os.environ:
        return _evaluate(config, result)
    file = folder / "run.yaml"
    file.write_text(to_yaml(config), encoding="utf-8")
    command = [RESOLVED, str(file), result]
    return launch(Path(__file__).resolve(), command, config, invocation.rendezvous, machine)


@contextmanager
def _weights(model: str) -> Iterator[list[str]]:
    """The flags that load a model: of a run with its chat template, of a LoRA run a checkpoint and the base.

    Beside the base stands what the export has of the run: tokenizer, shape and 4 bits.
    """
    from patch.preflight.stored_shape import run_behind, shape_at

    run = run_behind(model)
    if run is None or not run.adapter.lora_rank or run.checkpoint.load is None:
        chat = run.data.chat_template if run is not None else None
        yield ["--load", model, *([f"--chat-template={chat}"] if chat else [])]
        return
    from patch.compat import quick_start

    with quick_start():
        from patch.convert.offline import adapter_folder
    load, base = run.checkpoint.load, shape_at(run.checkpoint.load)
    changed = {field for field, *_ in differences(run.model, base.fields)} if base is not None else set()
    values = {FIELDS[name]: scalar_of(run, name) for name in (*sorted(changed), "quantize_base")}
    flags = [word for field, value in values.items() for word in flag_words(field, value)]
    with adapter_folder(any_path(model), run) as adapter:
        own = {"--load": load, "--lora-load": adapter, "--tokenizer-name-or-path": adapter}
        yield [*chain.from_iterable((flag, str(value)) for flag, value in own.items()), *flags]


def _evaluate(config: RunConfig, result: str) -> int:
    """Evaluate as one of the workers; the first one shows the scores, and writes them where that is asked."""
    from patch.compat import quick_start

    with quick_start():
        from patch.training.tasks.suite import scores_of_weights

    scores = scores_of_weights(config)
    if os.environ["RANK"] != "0":
        return 0
    for name, score in scores.items():
        if not name.endswith("_stderr"):
            error = f" +- {scores[each]:.4f}" if (each := f"{name}_stderr") in scores else ""
            print(f"{name.removeprefix('tasks/'):<40} {score:.4f}{error}")
    if result:
        Path(result).write_text(json.dumps(scores, indent=1) + "\n", encoding="utf-8")
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    usage = "%(prog)s FOLDER --tasks LIST [...] [-- FLAGS OF A RUN]"
    parser = ArgumentParser(prog=typed("python -m toolkits.evaluate"), usage=usage, description=__doc__)
    parser.add_argument("model", metavar="FOLDER", help="a Hugging Face folder or org/name, or a checkpoint")
    parser.add_argument("--tasks", required=True, metavar="LIST", help="names of tasks, groups, tags: a,b,c")
    parser.add_argument("--tasks-path", metavar="DIR", help="folder of their YAML files [those of lm-eval]")
    parser.add_argument("--limit", type=positive, default=0, metavar="N", help="questions of each [all]")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the scores there")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
