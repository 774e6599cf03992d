"""llama-patch: one command for all programs of this package. Each program has --help.

llama-patch train dsw auto 1 16 ... | llama-patch plan --machine h100 -- --model-size 8B
"""

from __future__ import annotations

import platform
import sys
from importlib import import_module
from importlib.metadata import version

import patch
from patch.errors import nearest

COMMANDS = {
    "quickstart": ("toolkits.quickstart.__main__", "fine-tune a small LLaMA on JSON, and question it"),
    "train": (
        "toolkits.train.__main__",
        "train a model: 25 positions and flags, as run_mcore_llama.sh, or flags",
    ),
    "migrate": ("toolkits.migrate", "YAML, JSON or shell script of another trainer as a command of train"),
    "chat": ("toolkits.chat", "talk to the model of a run, or of a Hugging Face folder"),
    "convert": ("toolkits.convert", "a Hugging Face folder to a checkpoint, and back"),
    "merge": ("toolkits.merge", "a LoRA adapter of PEFT into the weights of its Hugging Face folder"),
    "plan": ("toolkits.plan", "memory, time and cost of a run on any machine; layouts that suit it"),
    "prove": ("toolkits.prove.__main__", "does a run compute what one process does? its flags, made small"),
    "doctor": ("toolkits.doctor.__main__", "what this machine has, lacks and can do"),
    "preview": ("toolkits.preview_data", "data as tokens, learned or not, with its figures"),
    "preprocess": ("toolkits.preprocess_pretrain", "documents to .bin and .idx, for pre-training"),
    "inspect": ("toolkits.inspect_checkpoint", "what a checkpoint holds, and whether it is whole"),
    "evaluate": ("toolkits.evaluate.__main__", "scores of tasks: a Hugging Face folder's, or a checkpoint's"),
    "align": (
        "toolkits.verify_alignment",
        "is a checkpoint's difference from its Hugging Face folder normal?",
    ),
}
"""Name -> module whose `main` takes the rest of the command line, one-line description."""
_REMOVED = {"timeline": "open OUTPUT_BASEPATH/log/traces in Perfetto"}
"""Command of an earlier version -> what to use instead."""


def main() -> int:
    """Run the program that the first argument names; return its exit code, or 2 for an unknown name."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name in COMMANDS:
        return int(import_module(COMMANDS[name][0]).main(rest))
    lines = [f"  {command:<10} {text}" for command, (_, text) in COMMANDS.items()]
    if name == "--version":
        releases = [f"{package} {version(package)}" for package in ("megatron-core", "torch", "transformers")]
        releases.append(f"Python {platform.python_version()}")
        print(f"llama-patch {patch.__version__} ({', '.join(releases)})")
        return 0
    if name in ("-h", "--help"):
        usage = "usage: llama-patch COMMAND ...; llama-patch COMMAND --help; llama-patch --version"
        print("\n".join([usage, *lines]))
        return 0
    if name in _REMOVED:
        print(f"ERROR llama-patch: {name} was removed; {_REMOVED[name]}", file=sys.stderr)
        return 2
    refusal = f"ERROR llama-patch: got {name!r}{nearest(name, list(COMMANDS))}, expected:"
    print("\n".join([refusal, *lines]), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
