"""llama-patch migrate: the file of another trainer as a command of this project.

FILE is a YAML of LLaMA-Factory or Axolotl, DeepSpeed's JSON, or a shell script that calls Megatron-LM, or
Pai-Megatron-Patch's run_mcore_*.sh with its 25 positions. Scripts are read, never run. The command is
printed first, then comments: what is not taken over, and why. The rules of a run check the command.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping
from itertools import dropwhile
from pathlib import Path
from typing import Any

from patch.checks.rules import RULES
from patch.config import user_message
from patch.config.fields import FIELDS
from patch.config.flags import flag_words, grouped, is_flag
from patch.config.foreign_files import (
    DEEPSPEED,
    MOST_BYTES,
    NOT_NEEDED,
    Translation,
    fill_batch,
    flatten,
    translate,
)
from patch.config.foreign_flags import plain_name
from patch.config.positions import POSITIONS, VARIABLES
from patch.config.shell_script import OPTIONS, read_command
from patch.device import GPU_LIBRARIES, MachineFacts
from patch.errors import ConfigError, printable, shown
from patch.preflight.parse import parse_args
from patch.storage.text_files import parse_json, parse_yaml, read_small
from patch.text import counted
from toolkits._arguments import ArgumentParser, exit_code_of, local, members, typed

_PROGRAMS = {
    "Axolotl": {"base_model"},
    DEEPSPEED: {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"},
    "LLaMA-Factory": {"model_name_or_path", "stage", "finetuning_type", "cutoff_len"},
}
"""Program -> keys, one of which its file has."""
_STAND_INS = {
    "train_data_path": "DATA", "output_path": "RUN", "seq_length": 8, "lr": 1e-5, "micro_batch_size": 1,
    "train_iters": 10**6,
}  # fmt: skip
"""Required fields that a file may lack -> a value with which the rest can be checked."""
_ENGINES = ("deepspeed", "deepspeed-config")
"""Arguments that name a file of DeepSpeed."""
_Pairs = list[tuple[str, str]]


def main(argv: list[str]) -> int:
    """Run the command line; return 0, or the exit code of the error, such as 2 for a refused command."""
    options = _parse(argv)
    return exit_code_of(lambda: _migrate(options.file, options.arguments, options.gpus), user_message)


def _migrate(file: Path, arguments: list[str], gpus: int | None) -> None:
    try:
        text = read_small(file, MOST_BYTES).decode()
        if file.suffix in (".yaml", ".yml", ".json"):
            content = parse_json(text.encode()) if file.suffix == ".json" else parse_yaml(text)
            program, given = _of_keys(content if isinstance(content, dict) else {})
        else:
            command = read_command(text, arguments)
            program, given = "Megatron-LM", _of_words([*command.launcher, *command.words])
    except (OSError, ValueError) as error:  # a ConfigError too
        raise ConfigError(f"{file}: {error}") from error
    if program == "Megatron-LM" and command.words[:1] and command.words[0] in POSITIONS[0].words:
        environ = {name: command.variables[name] for name in VARIABLES if name in command.variables}
        _print_positions(command.words, environ)
    else:
        _print_flags(program, given, gpus)


def _of_keys(keys: dict[str, Any]) -> tuple[str, _Pairs]:
    for program, some in _PROGRAMS.items():
        if some & keys.keys():
            return program, flatten(keys)
    raise ConfigError(f"got {shown(list(keys))}, expected keys of {', '.join(_PROGRAMS)}")


def _of_words(words: list[str]) -> _Pairs:
    """Return the flags of a command with their values. Words that only a shell knows are flags too."""
    pairs: _Pairs = []
    for flag, values in grouped(list(dropwhile(lambda word: not is_flag(word), words)), {}):
        own = [value for value in values if not value.endswith(OPTIONS)]
        known = [value for value in own if "$" not in value] or own
        pairs += [(flag, " ".join(known) or "true")] if flag[0] != "-" or flag[1] == "-" else []
        pairs += [(value, value) for value in values if value not in known]
    texts = {plain_name(flag): text for flag, text in pairs}
    is_resumed = texts.get("load") == texts.get("save")  # ours resumes from --output-path
    return [pair for pair in pairs if not is_resumed or plain_name(pair[0]) != "load"]


def _print_flags(program: str, given: _Pairs, gpus: int | None) -> None:
    named = [text for name, text in given if plain_name(name) in _ENGINES]
    engines = [text for text in named if os.path.isfile(text)]
    found = translate(program, [pair for pair in given if pair[1] not in engines])
    engine = [word for text in engines for word in ("--deepspeed-config", text)]
    values, comments = found.values, []
    if "nproc_per_node" not in values or gpus:
        replica_batch = values.get("micro_batch_size", 0) * (found.accumulation or 0)
        implied = values.get("global_batch_size", 1) // (replica_batch or 1) if replica_batch else 1
        values["nproc_per_node"] = gpus or max(implied, 1)
        comments = [f"# for {counted(values['nproc_per_node'], 'GPU')}; --gpus N is for another number"]
    lost = [text for text in named if ".json" in text and text not in engines]
    comments += [f"# {text} is not here; its name gave the ZeRO stage" for text in lost]
    fill_batch(values, found.accumulation)
    lacking = {name: value for name, value in _STAND_INS.items() if name not in values}
    if "train_epochs" in values:
        lacking.pop("train_iters", None)
    has_model = not {"load", "model_size", "num_layers"}.isdisjoint(values)
    if to_add := [FIELDS[name].flag for name in [*([] if has_model else ["load"]), *lacking]]:
        comments.append(f"# to add: {', '.join(to_add)}")
    lines = [engine, *(_words({name: value}) for name, value in values.items())]
    _print(lines, {}, [*comments, *_answers(found)])
    checked = values | lacking
    fill_batch(checked, found.accumulation)
    for name in ("load", "tokenizer_name_or_path", "lora_load"):  # of the hub, or on another machine
        if not os.path.isdir(str(checked.get(name))):
            checked.pop(name, None)
    if "load" not in checked:
        checked |= {"vocab_size": 128256} if "num_layers" in checked else {"model_size": "8B"}
    _check([*engine, *_words(checked)], {}, values["nproc_per_node"])


def _print_positions(words: list[str], environ: dict[str, str]) -> None:
    positions = words[: len(POSITIONS)]
    for position, word in zip(POSITIONS, positions, strict=True):
        if "$" in word:
            raise ConfigError(f"{position.name}: got {word}, expected a value: arguments follow FILE")
    found = translate("Pai-Megatron-Patch", _of_words(words[len(POSITIONS) :]))
    flags = _words(found.values)
    _print([positions[:9], positions[9:19], positions[19:], flags], environ, _answers(found))
    if not os.path.isdir(positions[21]):
        positions[1], positions[21] = positions[1].replace("auto", "8B"), "none"
    _check([*positions, *flags], {**environ, "TOKENIZER_PATH": ""}, 8)


def _words(values: Mapping[str, object]) -> list[str]:
    fields = ((FIELDS[name], value) for name, value in values.items())
    return [word for field, value in fields for word in flag_words(field, field.to_scalar(value))]


def _print(lines: list[list[str]], environ: Mapping[str, str], comments: list[str]) -> None:
    head = [*(f"{name}={shlex.quote(value)}" for name, value in environ.items()), "llama-patch train"]
    print(" \\\n    ".join([" ".join(head), *map(shlex.join, filter(None, lines))]))
    for comment in comments:
        print(printable(comment).replace("\n", " "))


def _answers(found: Translation) -> list[str]:
    """Return one comment for each answer to arguments that set nothing, first those that are lost."""
    named: dict[str, list[str]] = {}
    for name, why in sorted(found.left, key=lambda pair: pair[1].startswith(NOT_NEEDED)):
        head = "not needed" if why.startswith(NOT_NEEDED) else "not taken over"
        named.setdefault(why.removeprefix(NOT_NEEDED).removeprefix("not there: "), [head]).append(name)
    return [f"# {head}: {', '.join(dict.fromkeys(names))}: {why}" for why, (head, *names) in named.items()]


def _check(argv: list[str], environ: Mapping[str, str], num_gpus: int) -> None:
    """Parse a command as train does, and apply the rules of a run on a machine with these GPUs."""
    libraries = frozenset(GPU_LIBRARIES)
    machine = MachineFacts(num_gpus, 64, compute_capability=(9, 0), libraries=libraries)
    config = parse_args(argv, environ, machine).config
    for rule in RULES:
        rule(config, machine)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(prog=typed("python -m toolkits.migrate"), description=__doc__)
    parser.add_argument("file", type=local, metavar="FILE", help="the .yaml, .yml, .json or shell script")
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="the script's own: $1, $2 and so on")
    parser.add_argument("--gpus", type=members, metavar="N", help="processes (as FILE says, else 1)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
