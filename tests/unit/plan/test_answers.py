"""What `llama-patch plan` and --dry-run print, a run's log at its start, and advice after an out-of-memory.

`RENEW_GOLDEN=1` writes answers.txt anew. The numbers behind the words are tested by hand beside this file.
"""

import dataclasses
import os
import re
from pathlib import Path

import pytest
from answers_on_file import check_answers
from planned_runs import H100, planned_run

from patch.plan.describe import start_lines
from patch.plan.planned_run import plan_run
from patch.plan.report import describe_here
from patch.plan.suggest import advice
from toolkits.plan import main

FILE = Path(__file__).with_name("answers.txt")


def answer(command: str, capsys) -> str:
    own, _, flags = command.partition("-- ")
    code = main(command.split())
    out, err = capsys.readouterr()
    lines = [line.rstrip() for line in (out + err).splitlines()]
    if code < 2 and "--search" not in own:
        given = dict(re.findall(r"--([a-z-]+)=(\S+)", own))
        nodes, devices = (int(given.get(name, 0)) or None for name in ("nodes", "devices-per-node"))
        planned = plan_run(flags.split(), given["machine"], nodes, devices, here=H100.facts)
        run, machine = planned.resolved, planned.machine.facts
        lines += ["in the log:", *start_lines(run, machine)]
        for memory in ("device", "host"):
            lines.append(f"{memory} out of memory: {advice(run, machine, on_device=memory == 'device')}")
    return "\n".join([*lines, f"exit {code}"]).replace(os.getcwd(), "HERE")


@pytest.mark.long
def test_every_answer_is_the_one_on_file(capsys) -> None:
    check_answers(FILE, lambda command: answer(command, capsys))


@pytest.mark.parametrize(
    ("changes", "named", "has_time"),
    [
        ({}, "planned for 2 machines of 8 x NVIDIA H100 80GB HBM3 (79.10 GiB), host", True),
        ({"cuda_name": "NVIDIA L4"}, "planned for this machine and those like it: NVIDIA L4", False),
        ({"cuda_devices": 0, "cuda_memory_bytes": 0}, "planned for 2 machines of this machine's CPU", False),
    ],
)
def test_a_steps_time_is_there_where_rates_are_known(changes, named, has_time) -> None:
    first, *lines = describe_here(planned_run(dp=16), dataclasses.replace(H100.facts, **changes))
    assert first.startswith(named) and lines[0].startswith("processes   16 = ")
    assert any(line.startswith("time ") for line in lines) == has_time
