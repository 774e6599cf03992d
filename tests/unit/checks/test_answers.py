"""What the rules answer, whole: answers.txt has command lines, each with its refusal or its notes.

`on=gpus` and the like are other machines than a CPU; words with = are positions or variables of the
environment that replace those of a good run. RENEW_GOLDEN=1 writes the answers anew.
"""

import os
import shlex
from pathlib import Path

from patch.config import resolve_transformer_impl, user_message
from patch.config.fields import NOT_BUILT
from patch.config.positions import POSITIONS
from patch.device import GPU_LIBRARIES, MachineFacts
from patch.errors import PatchError
from patch.preflight.validate import validate_run

FILE = Path(__file__).with_name("answers.txt")
NAMES = {position.name for position in POSITIONS}
MACHINES = {
    "cpu": MachineFacts(cuda_devices=0, cpu_cores=2),
    "gpus": MachineFacts(cuda_devices=2, cpu_cores=2),
    "ampere": MachineFacts(cuda_devices=2, cpu_cores=2, compute_capability=(8, 6)),
    "small": MachineFacts(cuda_devices=1, cpu_cores=2, cuda_memory_bytes=2**30),
    "hopper": MachineFacts(2, 2, compute_capability=(9, 0), libraries=frozenset(GPU_LIBRARIES)),
}


def _answer(command, line: str) -> str:
    words = [word.replace("FOLDER", str(command.folder)) for word in shlex.split(line)]
    flags = [word for word in words if word.startswith("-")]
    given = {"FL": "false"} | dict(word.split("=", 1) for word in words if not word.startswith("-"))
    machine = MACHINES[given.pop("on", "cpu")]
    environ = {name: given.pop(name) for name in {*given} - NAMES}
    before = dict(command.environ)
    command.environ |= environ
    try:
        invocation = command.parse(*flags, **given)
        notes = [*invocation.notes, *validate_run(invocation.config, machine)]
        notes += resolve_transformer_impl(invocation.config, machine)[1]
        answer = "\n".join(f"note: {note}" for note in notes) or "taken"
    except PatchError as error:
        answer = f"exit {error.exit_code}: {user_message(error)}"
    finally:
        command.environ = before
    return answer.replace(str(command.folder), "FOLDER").replace(os.getcwd(), "HERE")


def test_every_answer_is_the_one_on_file(command):
    for ending in ("bin", "idx"):
        (command.folder / f"docs.{ending}").touch()
    text = FILE.read_text()
    lines = [line for line in text.splitlines() if line.startswith("$ ")]
    found = "\n".join(f"{line}\n{_answer(command, line[2:])}\n" for line in lines)
    if os.environ.get("RENEW_GOLDEN"):
        FILE.write_text(found)
    assert found == text, "an answer changed: RENEW_GOLDEN=1 renews answers.txt; say so in CHANGELOG"
    missing = [row.feature for row in NOT_BUILT if f"{row.feature} is not built yet" not in text]
    assert not missing
