"""Whether a command of a document works: runs are read, checked and planned, tools are called here.

A tool that is quick runs where one of its arguments is of the fixtures; of the others the arguments are read.
"""

import argparse
import io
import logging
import os
import re
from collections.abc import Iterator
from contextlib import chdir, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from functools import cache
from importlib import import_module
from pathlib import Path
from unittest import mock

from guide_pages import KINDS, REPOSITORY, Block
from guide_shell import Call

from patch.checks.layout import fewer_machines_suffice
from patch.checks.run_length import profile_names_steps
from patch.config import user_message
from patch.config.flags import build_parser
from patch.config.positions import unknown_variables
from patch.device import MachineFacts
from patch.errors import PatchError
from patch.numbers import size_text
from patch.plan.fits import fit_of
from patch.plan.planned_run import Planned, plan_run
from patch.preflight.validate import validate_run
from toolkits.command import COMMANDS

HERE = MachineFacts(cuda_devices=0, cpu_cores=2, host_memory_bytes=64 * 2**30)
"""Where blocks without plan= run."""
_LAUNCHERS = ("run_mcore_llama.sh", "pretrain_llama.py", "slurm.sh", "toolkits/train/__main__.py")
_STARTERS = ("python", "python3", "torchrun", "srun", "sbatch", "pip")
_FILE = re.compile(r"(?!/)[\w./-]+\.(?:py|sh|txt)")
_RUN_HERE = ("convert", "plan", "preview_data", "preprocess_pretrain", "inspect_checkpoint")
_OTHERS = ("--signal", "--no-kill", "--no-build-isolation", "--use-tp-pp-dp-mapping", "--requeue",
    "--ntasks-per-node", "--tensor-parallel-size")  # fmt: skip
"""Flags of SLURM, pip and Megatron-LM that texts mention."""


class RefusedError(Exception):
    """What is wrong with a command."""


class _Read(BaseException):
    """The arguments of a tool that is not to run are right."""


def check(call: Call, block: Block, fixtures: Path) -> str:
    """What is wrong with a call of a block; empty if nothing is.

    Args:
        call: the program, as bash called it.
        block: where; one that says `fails` shows a command that is refused, or does not fit.
        fixtures: the folder of what commands may read.
    """
    kind = KINDS.fullmatch(block.info)
    assert kind is not None, block
    variables = {name: value for name, value in call.environ.items() if name not in ("PATH", "PWD", "OLDPWD")}
    refusal = ""
    with chdir(call.folder), mock.patch.dict(os.environ, variables):
        try:
            _check(call, kind, str(fixtures))
        except RefusedError as refused:
            refusal = str(refused)
        except PatchError as error:
            refusal = user_message(error)
    if kind["fails"]:
        return "" if refusal else "works, although its block says that it fails"
    return refusal


def _check(call: Call, kind: re.Match, fixtures: str) -> None:
    """Files of the repository that are named exist; a run can start, a tool reads its arguments."""
    name, *arguments = call.argv
    start = next((i for i, text in enumerate(arguments) if text.endswith(_LAUNCHERS)), None)
    named = arguments[: None if start is None else start + 1] if name in _STARTERS else ()
    for text in named:
        if _FILE.fullmatch(text) and not Path(text).is_file():
            raise RefusedError(f"there is no file {text}")
    if start is not None:
        _check_run(_processes(name, arguments[:start]), arguments[start + 1 :], call, kind)
    elif name == "make":
        _check_make(arguments)
    elif name == "llama-patch":
        if not arguments or arguments[0] not in COMMANDS:
            raise RefusedError(f"llama-patch has no command {arguments[:1]}")
        _check_tool(COMMANDS[arguments[0]][0], arguments[1:], call, kind, fixtures)
    elif name.startswith("python") and arguments[:1] == ["-m"]:
        _check_tool(arguments[1], arguments[2:], call, kind, fixtures)


def _check_make(arguments: list[str]) -> None:
    known = re.findall(r"^([a-z-]+):.*##", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    for text in arguments:
        if "=" not in text and text not in known:
            raise RefusedError(f"make has no target {text}, expected one of {', '.join(known)}")


def _processes(starter: str, own: list[str]) -> dict[str, str]:
    """torchrun's number of processes, as the run's variable."""
    for text, value in zip(own, [*own[1:], ""], strict=False):
        if starter == "torchrun" and (found := re.fullmatch(r"--nproc[-_]per[-_]node(?:=(\d+))?", text)):
            return {"NPROC_PER_NODE": found[1] or value}
    return {}


def _check_run(variables: dict[str, str], argv: list[str], call: Call, kind: re.Match) -> None:
    """A run that starts: read, checked as the launcher does, planned, and with room for it."""
    environ = {**call.environ, **variables}
    if unknown := unknown_variables(environ):
        raise RefusedError(unknown[0])
    argv = [text for text in argv if text not in ("--dry-run", "--force")]
    planned = plan_for(argv, environ, kind)
    facts = planned.machine.facts
    for rule in (fewer_machines_suffice, profile_names_steps):
        rule(planned.resolved, facts)
    if kind["machine"] is None and not any("://" in text for text in argv):
        validate_run(planned.run, facts)
    fit = fit_of(planned.resolved, facts)
    if not fit.is_whole:
        needed, usable = (size_text(size) for size in (fit.device_needed, fit.device_usable))
        if fit.is_on_device:
            needed, usable = (size_text(size) for size in (fit.host_needed, fit.host_usable))
        raise RefusedError(f"does not fit {planned.machine.name}: it needs {needed} of {usable}")


def plan_for(argv: list[str], environ: dict[str, str], kind: re.Match) -> Planned:
    """The run on the machine that the block names, else on CPUs."""
    if kind["machine"] is None:
        nodes = environ.get("WORLD_SIZE") if argv[:1] == ["dlc"] else None
        return plan_run(argv, "here", int(nodes) if nodes else None, environ=environ, here=HERE)
    nodes, devices = int(kind["nodes"] or 1), int(kind["devices"])
    return plan_run(argv, kind["machine"], nodes, devices, environ=environ, here=HERE)


def _check_tool(module: str, argv: list[str], call: Call, kind: re.Match, fixtures: str) -> None:
    name = module.removeprefix("toolkits.").removesuffix(".__main__")
    if name == "train":
        _check_run({}, argv, call, kind)
        return
    place = REPOSITORY / module.removesuffix(".__main__").replace(".", "/")
    if not module.startswith("toolkits.") or not (place.is_dir() or place.with_suffix(".py").is_file()):
        raise RefusedError(f"there is no tool {module}")
    runs = name == "plan" or (name in _RUN_HERE and any(fixtures in text for text in argv))
    program = f"toolkits.{name}.__main__" if place.is_dir() else f"toolkits.{name}"
    _call(program, argv, runs=runs)


def _call(module: str, argv: list[str], *, runs: bool) -> None:
    """Call a tool's `main`, or only let it read its arguments."""
    if module.endswith("preprocess_pretrain"):
        argv = [*argv, "--workers", "1"]
    said, code = io.StringIO(), 0
    logging.getLogger("patch").handlers.clear()
    with redirect_stdout(said), redirect_stderr(said), nullcontext() if runs else _reading_only():
        try:
            code = import_module(module).main(argv)
        except _Read:
            pass
        except SystemExit as ended:
            code = int(ended.code or 0)
    if code:
        raise RefusedError(f"{module} ended with {code}: {said.getvalue().strip()[-600:]}")


@contextmanager
def _reading_only() -> Iterator[None]:
    """Inside, a program ends after it has read its arguments."""
    read = argparse.ArgumentParser.parse_args

    def read_and_end(self: argparse.ArgumentParser, *arguments: object) -> None:
        read(self, *arguments)
        raise _Read

    with mock.patch.object(argparse.ArgumentParser, "parse_args", read_and_end):
        yield


@cache
def known_flags() -> set[str]:
    """The flags of a run and of all tools, as their sources name them, and a few of other programs."""
    found = {*build_parser()._option_string_actions, *_OTHERS}
    for file in (REPOSITORY / "toolkits").rglob("*.py"):
        found |= set(re.findall(r'"(--[a-z0-9-]+)"', file.read_text()))
    return found | {flag.replace("--", "--no-", 1) for flag in found}
