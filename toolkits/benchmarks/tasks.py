"""Compares scores of tasks on our model with lm-evaluation-harness's own `hf` model, in time and in values.

A small LLaMA with random weights and a vocabulary of 32,000 answers questions with four short answers (as
ARC), with one letter each (as MMLU with examples), and texts by their log-likelihood. Both get lm-eval's same
requests and one thread, and take turns; a forward of `hf` has the batch that is the fastest of 4, 8 and 16.

python -m toolkits.benchmarks.tasks [--quick] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from patch import compat
from patch.convert import import_hf
from patch.distributed.groups import alone
from patch.preflight.stored_shape import read_hf_config
from patch.training.evaluation import evaluating
from toolkits.benchmarks._contenders import OurTrainer, run_config
from toolkits.benchmarks._measure import Rounds, take_turns, time_call
from toolkits.benchmarks._report import Aim, NotRunError, Report, run_benchmark
from toolkits.benchmarks._runner import CPU
from toolkits.quickstart.seed_model import write_tokenizer

OURS, THEIRS = "ours", "lm-eval's hf"
_WORDS = "the of a in to is and that for it as was with be by on not he his but at are this have from".split()
_SHAPE: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1024, "bos_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip
_BATCHES = (4, 8, 16)
_BOUND = 1e-5
"""Of log-likelihoods: relative where they are above 1."""


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report."""
    return run_benchmark(_run, argv, rounds=(5, 2), quick="fewer questions and rounds")


def _run(arguments: argparse.Namespace) -> Report:
    if find_spec("lm_eval") is None:
        raise NotRunError("lm-eval is missing (pip install lm-eval==0.4.13)")
    compat.apply(cuda=False)
    torch.set_num_threads(1)
    questions = _questions(8 if arguments.quick else 40)
    with tempfile.TemporaryDirectory() as name, alone(CPU) as groups:
        models = _models(Path(name), groups)
        found: dict[str, Any] = {}
        values: dict[str, dict[str, list[float]]] = {}
        for kind, requests in questions.items():
            timed = {model: partial(_timed, ask, requests) for model, ask in models.items()}
            taken = take_turns(timed, arguments.rounds)
            values[kind] = {model: [seconds for seconds, _ in rounds] for model, rounds in taken.items()}
            found[kind] = {model: rounds[0][1] for model, rounds in taken.items()}
    lines, aims, panels = [], [], []
    for kind, seconds in values.items():
        best = min((model for model in seconds if model != OURS), key=lambda model: sum(seconds[model]))
        rounds = Rounds(seconds, "s of processor time")
        distance = max(
            abs(ours - theirs) / max(1.0, abs(theirs))
            for (ours, _), (theirs, _) in zip(found[kind][OURS], found[kind][best], strict=True)
        )
        lines.append(rounds.table(kind, best))
        aims += [Aim(f"{kind}: time / {best}", rounds.ratio(OURS, best), 1.0)]
        aims += [Aim(f"{kind}: distance of log-likelihoods / {_BOUND}", distance / _BOUND, 1.0)]
        panels.append(rounds.panel(kind))
    return Report("\n".join(lines), aims, panels, {"seconds": values})


def _timed(ask: Callable[[Any], Any], requests: Any) -> tuple[float, Any]:
    """Processor time of one thread, to which other work on the machine adds little."""
    answers: list[Any] = []
    seconds = time_call(lambda: answers.extend(ask(requests)), CPU)
    return seconds.cpu, answers


def _questions(count: int) -> dict[str, list[Any]]:
    """lm-eval's requests: a context and what may follow it."""
    from lm_eval.api.instance import Instance

    pick = random.Random(0)

    def text(most: int) -> str:
        return " ".join(pick.choice(_WORDS) for _ in range(pick.randrange(most // 3, most)))

    contexts = [text(40) for _ in range(count)]
    examples = [text(300) for _ in range(count)]
    pairs = {
        "four short answers": [(context, f" {text(12)}") for context in contexts for _ in range(4)],
        "letters": [(context, f" {letter}") for context in examples for letter in "ABCD"],
        "texts": [(text(20), f" {text(150)}") for _ in range(count)],
    }
    return {name: [Instance("loglikelihood", {}, pair, 0) for pair in own] for name, own in pairs.items()}


def _models(folder: Path, groups: ProcessGroupCollection) -> dict[str, Callable[[Any], Any]]:
    """What answers requests, by its name; all have the same weights in fp32."""
    from lm_eval.models.huggingface import HFLM

    from patch.training.tasks.live_model import LiveModel
    from patch.training.tasks.scoring import answers_to
    from patch.training.tasks.templates import Templates

    tokenizer = write_tokenizer(folder, [" ".join(_WORDS)])
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**_SHAPE)).save_pretrained(folder)
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = run_config(1024, **read_hf_config(folder))
    run = OurTrainer(config, groups, CPU.device).run
    with run.optimizer.full_weights():
        import_hf(run.stages, folder, config.model, groups)
    run.optimizer.reload_model_params()
    ours = LiveModel(tokenizer, 1024, partial(answers_to, run), Templates(tokenizer).chat)

    def ask(requests: Any) -> Any:
        with evaluating(run):
            return ours.loglikelihood(requests, disable_tqdm=True)

    theirs = {
        f"{THEIRS}, batches of {size}": partial(
            HFLM(pretrained=hf, tokenizer=tokenizer, batch_size=size, max_length=1024).loglikelihood,
            disable_tqdm=True,
        )
        for size in _BATCHES
    }
    return {OURS: ask, **theirs}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
