"""Fine-tune a small LLaMA on JSON with two processes, then test the exported model with questions.

    python -m toolkits.quickstart [--model smollm2] [--output DIR] [--lora] [FLAGS OF THE LAUNCHER]

It writes its own model and data and runs on the CPU; GPUs are not used. It trains with the ordinary launcher
and all 25 positions, and prints this command, so that you can repeat it with your own data. With --lora a
first run trains a base without questions about dates; then adapters learn all questions. Exit code 0: at
least 90 % of the answers are right; 1: fewer; if training fails, the launcher's exit code.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from patch.storage.names import HF_FOLDER
from toolkits._arguments import exit_code_of
from toolkits._program import LAUNCHER, run_training
from toolkits.quickstart.tasks import DATE_INSTRUCTION, Example
from toolkits.quickstart.workspace import Workspace, prepare

PASS_PERCENT = 90.0
NUM_PROCESSES = 2
NUM_SHOWN = 8
MAX_ANSWER_TOKENS = 24
BASE_STEPS, LORA_STEPS = 800, 1000
LORA_FLAGS = ("--lora-rank", "16", "--lora-alpha", "32", "--train-iters", str(LORA_STEPS))


def launcher_command(space: Workspace, precision: str, more_flags: Sequence[str] = ()) -> list[str]:
    """Return the launcher's command: its 25 positions, the flags of this run, then `more_flags`."""
    positions = (
        *("dsw", "auto", "32", "64", "5e-3", "1e-4", "64", "40"),  # ENV MODEL_SIZE BATCH_SIZE ... PAD_LEN
        *(precision, "1", "1", "1", "false", "false", "false", "true"),  # PR TP PP CP SP DO FL SFT
        *("none", "false", "500", str(space.train_data), str(space.valid_data), str(space.model)),
        *("1500", "60", str(space.run)),  # TRAIN_TOKENS_OR_ITERS WARMUP_TOKENS_OR_ITERS OUTPUT_BASEPATH
    )
    flags = ["--eval-interval", "300", "--eval-iters", "3", "--export-hf", *more_flags]
    return ["bash", str(LAUNCHER), *positions, *flags]


def train(space: Workspace, precision: str, more_flags: Sequence[str]) -> int:
    """Run the launcher with processes on the CPU; return its exit code.

    Args:
        precision: position 9.
    """
    settings = {"MP_DATASET_TYPE": "raw", "NPROC_PER_NODE": str(NUM_PROCESSES)}
    command = launcher_command(space, precision, more_flags)
    shown = [f"{name}={value}" for name, value in settings.items()] + [shlex.join(command)]
    print(" ".join(shown), flush=True)
    environment = {**os.environ, **settings, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    return run_training(command, environment)


def train_base(space: Workspace, precision: str) -> int:
    """Train all weights on all questions except dates; return the launcher's exit code.

    The exported folder replaces the model to start from.

    Args:
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


def answer(folder: Path, examples: list[Example]) -> list[str]:
    """Return greedy answers of the Hugging Face model in `folder`, all questions in one left-padded batch."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.padding_side = "left"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    conversations = [[{"role": "user", "content": example.question}] for example in examples]
    texts = tokenizer.apply_chat_template(conversations, tokenize=False, add_generation_prompt=True)
    prompts = tokenizer(texts, padding=True, add_special_tokens=False, return_tensors="pt")
    tokens = model.generate(**prompts, do_sample=False, max_new_tokens=MAX_ANSWER_TOKENS)
    return tokenizer.batch_decode(tokens[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)


def exact_match_percent(examples: list[Example], outputs: list[str]) -> float:
    """Return the share of answers, 0 to 100, that are equal, including case and white space."""
    return 100.0 * sum(map(str.__eq__, outputs, (each.answer for each in examples))) / len(examples)


def report(space: Workspace, examples: list[Example], outputs: list[str], seconds: float) -> None:
    """Print some answers, the losses, the share of right answers, and the paths of plot and model.

    Args:
        examples, outputs: held-out questions, and the model's answers.
        seconds: time of the whole quickstart.
    """
    first, *_, last = space.losses().values()
    for example, output in zip(examples[:NUM_SHOWN], outputs, strict=False):
        verdict = "right" if output == example.answer else f"wrong, expected {example.answer}"
        question = example.question.replace("\n", "\\n")  # as in the prompt
        print(f"  {question} -> {output}  ({verdict})")
    print(f"loss: {first:.4f} -> {last:.4f}")
    right = exact_match_percent(examples, outputs)
    print(f"exact match: {right:.1f} % of {len(examples)} held-out questions")
    files = (space.run / "log/loss.png", space.trained, Path(sys.prefix) / "bin/activate")
    plot, model, activate = map(os.path.relpath, files)
    print(f"loss plot:   {plot}")
    print(f"model:       {model}")
    print(f"time:        {seconds:.0f} s")
    print(f"talk to it:  source {activate}; llama-patch chat {model}", flush=True)


def fine_tune_toy(output: Path, precision: str, more_flags: Sequence[str], *, lora: bool) -> int:
    """Prepare, train, export and test the toy; return the exit code.

    Args:
        output: the folder to work in.
        precision, more_flags: as of `train`.
        lora: train adapters.
    """
    begin = time.monotonic()
    disable_progress_bar()
    space, held_out = prepare(output)
    print(f"[1/3] a model, a tokenizer and data are in {space.root}", flush=True)
    print(f"[2/3] training over {NUM_PROCESSES} processes", flush=True)
    if lora:
        if code := train_base(space, precision):
            return code
        before = exact_match_percent(held_out, answer(space.model, held_out))
        print(f"the base: {before:.1f} % right; now adapters", flush=True)
        more_flags = [*LORA_FLAGS, *more_flags]
    if code := train(space, precision, more_flags):
        return code
    print("[3/3] asking the exported model questions", flush=True)
    outputs = answer(space.trained, held_out)
    report(space, held_out, outputs, time.monotonic() - begin)
    return 0 if exact_match_percent(held_out, outputs) >= PASS_PERCENT else 1


def main(argv: list[str]) -> int:
    """Run the command line; return the exit code."""
    raw, name = argparse.RawDescriptionHelpFormatter, "python -m toolkits.quickstart"
    parser = argparse.ArgumentParser(name, description=__doc__, formatter_class=raw)
    parser.add_argument("--output", type=Path, default=Path("quickstart_output"), help="folder to work in")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp8"), default="fp32", help="position 9")
    parser.add_argument("--lora", action="store_true", help="toy: train adapters beside a base without dates")
    parser.add_argument(
        "--model", choices=("toy", "smollm2"), default="toy",
        help="toy: a model that this program writes; smollm2: SmolLM2-135M-Instruct learns a new name",
    )  # fmt: skip
    parser.add_argument("--full", action="store_true", help="smollm2: train all weights, not LoRA adapters")
    options, flags = parser.parse_known_args(argv)
    output, precision = options.output.resolve(), options.precision
    if options.model == "toy":
        return exit_code_of(lambda: fine_tune_toy(output, precision, flags, lora=options.lora))
    from toolkits.quickstart import smollm2

    return exit_code_of(lambda: smollm2.main(output, precision, flags, is_full=options.full))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
