"""Fine-tunes a small LLaMA on JSON with two processes, then tests the exported model with questions.

    python -m toolkits.quickstart [--output DIR] [--precision fp32|bf16|fp8] [--lora] [FLAGS OF THE LAUNCHER]

It writes its own model and data and runs on the CPU; GPUs are not used. It trains with the ordinary launcher
and all 25 positions, and prints this command, so that you can repeat it with your own data. With --lora a
first run makes a base that has seen no dates, beside which adapters then learn all questions. Exit code: 0 if
at least 90 % of the answers are right, otherwise 1; the launcher's exit code if training fails.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from patch.errors import PatchError
from patch.storage.names import HF_FOLDER
from toolkits._program import LAUNCHER
from toolkits.quickstart.tasks import DATE_INSTRUCTION, Example
from toolkits.quickstart.workspace import Workspace, prepare

PASS_PERCENT = 90.0
NUM_PROCESSES = 2
NUM_SHOWN = 8
MAX_ANSWER_TOKENS = 24
BASE_STEPS, LORA_STEPS = 800, 1000
LORA_FLAGS = ("--lora-rank", "16", "--lora-alpha", "32", "--train-iters", str(LORA_STEPS))


def launcher_command(space: Workspace, precision: str, more_flags: Sequence[str] = ()) -> list[str]:
    """The command of the launcher: its 25 positions in order, then the flags of this run, then more."""
    positions = (
        *("dsw", "auto", "32", "64", "5e-3", "1e-4", "64", "40"),  # ENV MODEL_SIZE BATCH_SIZE ... PAD_LEN
        *(precision, "1", "1", "1", "false", "false", "false", "true"),  # PR TP PP CP SP DO FL SFT
        *("none", "false", "500", str(space.train_data), str(space.valid_data), str(space.model)),
        *("1500", "60", str(space.run)),  # TRAIN_TOKENS_OR_ITERS WARMUP_TOKENS_OR_ITERS OUTPUT_BASEPATH
    )
    flags = ["--eval-interval", "300", "--eval-iters", "3", "--export-hf", *more_flags]
    return ["bash", str(LAUNCHER), *positions, *flags]


def train(
    space: Workspace, precision: str, more_flags: Sequence[str] = (), num_processes: int = NUM_PROCESSES
) -> int:
    """Run the launcher with processes on the CPU; returns its exit code.

    Args:
        space: the folders of the quickstart.
        precision: position 9.
        more_flags: more flags of the launcher.
        num_processes: replicas of the model.
    """
    settings = {"MP_DATASET_TYPE": "raw", "NPROC_PER_NODE": str(num_processes)}
    command = launcher_command(space, precision, more_flags)
    shown = [f"{name}={value}" for name, value in settings.items()] + [shlex.join(command)]
    print(" ".join(shown), flush=True)
    environment = {**os.environ, **settings, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(command, env=environment) as launcher:
        try:
            return launcher.wait()
        except KeyboardInterrupt:  # the launcher got the same signal and saves a checkpoint
            return launcher.wait()


def train_base(space: Workspace, precision: str) -> int:
    """Train all weights on the questions but those of dates; returns the launcher's exit code.

    The exported folder takes the place of the model to start from.

    Args:
        space: the folders of the quickstart; its run is another one's afterwards.
        precision: position 9.
    """
    data = space.train_data.with_name("without_dates.jsonl")
    rows = space.train_data.read_text().splitlines(keepends=True)
    data.write_text("".join(row for row in rows if DATE_INSTRUCTION not in row))
    base = space.root / "base"
    flags = {"--train-data-path": data, "--output-path": base, "--train-iters": BASE_STEPS}
    code = train(space, precision, [str(each) for flag in flags.items() for each in flag])
    if code == 0:
        shutil.rmtree(space.model)
        (base / HF_FOLDER).rename(space.model)
    return code


class Answered(NamedTuple):
    """A held-out question and the model's answer."""

    example: Example
    output: str

    @property
    def is_right(self) -> bool:
        """Whether the answer matches exactly, including case and white space."""
        return self.output == self.example.answer


def answer(folder: Path, examples: list[Example]) -> list[Answered]:
    """Greedy answers of the Hugging Face model in `folder`, all questions in one left-padded batch."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.padding_side = "left"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    conversations = [[{"role": "user", "content": example.question}] for example in examples]
    texts = tokenizer.apply_chat_template(conversations, tokenize=False, add_generation_prompt=True)
    prompts = tokenizer(texts, padding=True, add_special_tokens=False, return_tensors="pt")
    tokens = model.generate(**prompts, do_sample=False, max_new_tokens=MAX_ANSWER_TOKENS)
    outputs = tokenizer.batch_decode(tokens[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    return [Answered(example, text) for example, text in zip(examples, outputs, strict=True)]


def exact_match_percent(answered: list[Answered]) -> float:
    """Share of right answers, 0 to 100."""
    return 100.0 * sum(each.is_right for each in answered) / len(answered)


def report(space: Workspace, answered: list[Answered], seconds: float) -> None:
    """Print some answers, the losses, the share of right answers, and the paths of plot and model.

    Args:
        space: the folders of the quickstart.
        answered: the held-out questions with the model's answers.
        seconds: time of the whole quickstart.
    """
    first, *_, last = space.losses().values()
    for example, output in answered[:NUM_SHOWN]:
        verdict = "right" if output == example.answer else f"wrong, expected {example.answer}"
        question = example.question.replace("\n", "\\n")  # as the model was asked
        print(f"  {question} -> {output}  ({verdict})")
    print(f"loss: {first:.4f} -> {last:.4f}")
    print(f"exact match: {exact_match_percent(answered):.1f} % of {len(answered)} held-out questions")
    plot, model = (os.path.relpath(space.run / name) for name in ("log/loss.png", "hf"))
    print(f"loss plot:   {plot}")
    print(f"model:       {model}")
    print(f"time:        {seconds:.0f} s")
    print(
        "talk to it:  docs/fine_tuning.md, Use the model\n"
        "next:        source .venv/bin/activate; llama-patch preview YOUR_CHATS.json "
        "--tokenizer-name-or-path YOUR_MODEL; then README.md, Train a model of your own",
        flush=True,
    )


def main(argv: list[str]) -> int:
    """Prepare, train, export and test the model; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m toolkits.quickstart",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, default=Path("quickstart_output"), help="folder to work in")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp8"), default="fp32", help="position 9")
    parser.add_argument("--lora", action="store_true", help="train adapters beside a base without dates")
    options, more_flags = parser.parse_known_args(argv)
    output = options.output.resolve()
    begin = time.monotonic()
    disable_progress_bar()
    try:
        space, held_out = prepare(output)
    except PatchError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"[1/3] a model, a tokenizer and data are in {space.root}", flush=True)
    print(f"[2/3] training over {NUM_PROCESSES} processes", flush=True)
    if options.lora:
        code = train_base(space, options.precision)
        if code != 0:
            return code
        before = exact_match_percent(answer(space.model, held_out))
        print(f"the base: {before:.1f} % right; now adapters", flush=True)
        more_flags = [*LORA_FLAGS, *more_flags]
    code = train(space, options.precision, more_flags)
    if code != 0:
        return code
    print("[3/3] asking the exported model questions", flush=True)
    answered = answer(space.trained, held_out)
    report(space, answered, time.monotonic() - begin)
    return 0 if exact_match_percent(answered) >= PASS_PERCENT else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
