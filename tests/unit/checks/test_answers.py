"""What a command line comes to, whole: answers.txt has lines, each with its refusal or its run and notes.

A line has flags, and words with = which replace positions or variables of the environment of a good run. The
answer names the fields in which the run differs from the good one. Besides,

    on=gpus         is another machine than a CPU
    json={...}      is what FOLDER/hf/config.json says otherwise; its model is loaded and gives the shape
    yaml={...}      is a file for --config
    after='...'     are words of an earlier run in this folder, which this one resumes
    only ...        is the command line as it stands, without the good positions

RENEW_GOLDEN=1 writes the answers anew.
"""

import json
import os
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from answers_on_file import check_answers
from command_line import CPU, begin

from patch.config import RunConfig, unknown_variables, user_message
from patch.config.fields import FIELDS, scalar_of
from patch.config.positions import POSITIONS
from patch.device import GPU_LIBRARIES, MachineFacts
from patch.errors import PatchError
from patch.features.backends import resolve_transformer_impl
from patch.preflight.cluster import Rendezvous, slurm_task
from patch.preflight.parse import parse_args
from patch.preflight.resume_guard import resume_notes
from patch.preflight.validate import run_warnings, validate_run

FILE = Path(__file__).with_name("answers.txt")
SETS = ("docs.bin", "docs.idx", "docs.jsonl")
NAMES = {position.name for position in POSITIONS}
MACHINES = {
    "cpu": CPU,
    "old": replace(CPU, multiplies_16_bits=False),
    "gpus": MachineFacts(cuda_devices=2, cpu_cores=2),
    "ampere": MachineFacts(cuda_devices=2, cpu_cores=2, compute_capability=(8, 6)),
    "small": MachineFacts(cuda_devices=1, cpu_cores=2, cuda_memory_bytes=2**30),
    "hopper": MachineFacts(2, 2, compute_capability=(9, 0), libraries=frozenset(GPU_LIBRARIES)),
}


def _make_files(folder: Path) -> None:
    for name in (*SETS, "docs,1.jsonl", "splits/train.json", "splits/test.json", "gguf/a.gguf"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    for name in ("empty", "adapter", "meta"):
        (folder / name).mkdir()
    (folder / "other").mkdir()
    (folder / "other" / "tokenizer.json").write_text("{ }")
    (folder / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    (folder / "meta" / "params.json").write_text("{}")


def _differences(config: RunConfig, good: RunConfig) -> str:
    values = {field: scalar_of(config, field) for field in FIELDS}
    return ", ".join(
        f"{field} {values[field]}" for field in FIELDS if values[field] != scalar_of(good, field)
    )


def _invocation(command, argv: list[str], environ: dict[str, str], machine: MachineFacts):
    environ = command.environ | environ
    task = slurm_task(argv[0] if argv else "", environ)
    invocation = parse_args(argv, environ | task, machine)
    of_task = [f"SLURM's task is a worker: {task}"] if task else []
    return invocation._replace(notes=[*unknown_variables(environ), *of_task, *invocation.notes])


def _run(command, words: list[str]):
    """The invocation of a line, and its machine."""
    if words[:1] == ["only"]:
        return _invocation(command, words[1:], {}, CPU), CPU
    flags = [word for word in words if word.startswith("-")]
    given = {"FL": "false"} | dict(word.split("=", 1) for word in words if not word.startswith("-"))
    machine = MACHINES[given.pop("on", "cpu")]
    if (changes := given.pop("json", None)) is not None:
        folder = command.hf_folder(**json.loads(changes))
        given = {"MODEL_SIZE": "auto", "PRETRAIN_CHECKPOINT_PATH": folder} | given
    if (text := given.pop("yaml", None)) is not None:
        (command.folder / "run.yaml").write_text(text.replace("\\n", "\n"))
        flags.append(f"--config={command.folder}/run.yaml")
    environ = {name: given.pop(name) for name in {*given} - NAMES}
    return _invocation(command, command.argv(*flags, **given), environ, machine), machine


def _answer(command, line: str, good: RunConfig) -> str:
    words = [word.replace("FOLDER", str(command.folder)) for word in shlex.split(line)]
    earlier = next((word.removeprefix("after=") for word in words if word.startswith("after=")), None)
    words = [word for word in words if not word.startswith("after=")]
    if earlier is not None:
        begin(_run(command, shlex.split(earlier))[0].config)
    try:
        invocation, machine = _run(command, words)
        config = invocation.config
        notes = [*invocation.notes, *validate_run(config, machine), *run_warnings(config)]
        notes += resolve_transformer_impl(config, machine)[1]
        notes += [f"resumed: {note}" for note in resume_notes(config)]
        met = [] if invocation.rendezvous == Rendezvous() else [f"meets: {invocation.rendezvous}"]
        differences = _differences(config, good)
        answer = "\n".join([differences or "the good run", *met, *(f"note: {note}" for note in notes)])
    except PatchError as error:
        answer = f"exit {error.exit_code}: {user_message(error)}"
    finally:
        shutil.rmtree(command.folder / "out", ignore_errors=True)
    return answer.replace(str(command.folder), "FOLDER").replace(os.getcwd(), "HERE")


@pytest.mark.long
def test_every_answer_is_the_one_on_file(command):
    _make_files(command.folder)
    good = command.parse(FL="false").config
    text = check_answers(FILE, lambda question: _answer(command, question, good))
    refused = {match[1] for match in re.finditer(r"^exit 2: (--[a-z0-9-]+)", text, re.MULTILINE)}
    assert len(refused) > 60
