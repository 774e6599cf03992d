"""Read the project's documents, and check that their commands work.

The parser of markdown-it reads each page once. A page's bash blocks run in a real bash whose programs only
record their calls. Each call is checked here: runs are read, checked and planned; tools are called, or parse
their arguments. A fault is a text with the page's name and line.
"""

import argparse
import io
import logging
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import chdir, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple
from unittest import mock
from urllib.parse import unquote

from markdown_it import MarkdownIt

from patch.checks.layout import fewer_machines_suffice
from patch.checks.run_length import profile_names_steps
from patch.config import user_message
from patch.config.flags import build_parser
from patch.config.positions import unknown_variables
from patch.device import MachineFacts
from patch.errors import PatchError
from patch.plan.fits import fit_of
from patch.plan.planned_run import PlannedRun, plan_run
from patch.preflight.validate import validate_run
from patch.text import size_text
from toolkits.command import COMMANDS

REPOSITORY = Path(__file__).parents[2]
KINDS = re.compile(r"bash( plan=(?P<machine>[a-z]\d+)x(?P<devices>\d+)(x(?P<nodes>\d+))?)?(?P<fails> fails)?")
CHINESE = "_zh"
_SOURCE_FILE = re.compile(r"(?:patch|toolkits|tests)/[\w/]+\.(?:py|sh|md)")
_FLAG = re.compile(r"(?<![\w-])--[a-z0-9][a-z0-9-]*")


# Content of a page.


class Block(NamedTuple):
    """Fenced block: its first line of text, its info string, its text."""

    line: int
    info: str
    text: str

    @property
    def is_bash(self) -> bool:
        return KINDS.fullmatch(self.info) is not None


@dataclass
class Page:
    """A document. The line of a text is the first line of its paragraph or row."""

    path: Path
    blocks: list[Block] = field(default_factory=list)
    links: list[tuple[int, str]] = field(default_factory=list)
    """Line and target of links and images."""
    codes: list[tuple[int, str]] = field(default_factory=list)
    """Line and text of inline code."""
    headings: list[tuple[str, str]] = field(default_factory=list)
    """Level (h1, ...) and text."""
    rows: list[tuple[str, list[str]]] = field(default_factory=list)
    """Table rows without heads: the heading above the table, and the cells."""

    def told(self, faults: list[tuple[int, str]]) -> list[str]:
        return [f"{self.path.name}:{line}: {why}" for line, why in sorted(faults)]


@cache
def read_page(path: Path) -> Page:
    """Return a document, read only once."""
    page, opened = Page(path), None
    for token in MarkdownIt("commonmark").enable("table").parse(path.read_text(encoding="utf-8")):
        line = (token.map or [0])[0] + 1
        if token.type in ("fence", "code_block"):
            page.blocks.append(Block(line + 1, token.info.strip() or "indented", token.content))
        elif token.type == "inline":
            children = token.children or []
            if opened.type == "heading_open":
                page.headings.append((opened.tag, "".join(child.content for child in children)))
            elif opened.type == "td_open":
                page.rows[-1][1].append(token.content)
            targets = (child.attrGet("href") or child.attrGet("src") for child in children)
            page.links += [(line, unquote(str(target))) for target in targets if target]
            page.codes += [(line, child.content) for child in children if child.type == "code_inline"]
        elif token.type == "tr_open":
            page.rows.append((page.headings[-1][1] if page.headings else "", []))
        opened = token
    page.rows = [row for row in page.rows if row[1]]
    return page


def faults_of_links(page: Page) -> list[str]:
    """Return links, images and file names in code that point to missing files of the repository."""
    found = [(line, _link_fault(page, target)) for line, target in page.links]
    for line, text in page.codes:
        if _SOURCE_FILE.fullmatch(text) and not (REPOSITORY / text).is_file():
            found.append((line, f"there is no file {text}"))
    return page.told([(line, why) for line, why in found if why])


def _link_fault(page: Page, target: str) -> str:
    if re.match(r"[a-z]+:", target):
        return ""
    path, _, anchor = target.partition("#")
    file = (page.path.parent / path).resolve() if path else page.path
    if not file.exists():
        return f"the link {target} leads nowhere"
    if anchor and (file.suffix != ".md" or anchor not in _anchors(read_page(file))):
        return f"the link {target} names no heading of {file.name}"
    return ""


def _anchors(page: Page) -> set[str]:
    """Return GitHub's anchors of a page's headings, for headings that occur once."""
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for _, text in page.headings}


def faults_of_flags(page: Page) -> list[str]:
    """Return flags in inline code that neither a run nor a tool has."""
    found = [(line, flag) for line, text in page.codes for flag in _FLAG.findall(text)]
    unknown = [(line, flag) for line, flag in found if flag not in _known_flags()]
    # A text that ends with "-" stands for several flags, such as --no-...
    return page.told([(line, f"there is no flag {flag}") for line, flag in unknown if flag[-1] != "-"])


@cache
def _known_flags() -> set[str]:
    """Return the flags of runs and of all tools, found in their sources, and some flags of other programs."""
    found = {*build_parser()._option_string_actions, *_OTHERS}
    for file in (REPOSITORY / "toolkits").rglob("*.py"):
        found |= set(re.findall(r'"(--[a-z0-9-]+)"', file.read_text()))
    return found | {flag.replace("--", "--no-", 1) for flag in found}


_OTHERS = ("--signal", "--no-kill", "--no-build-isolation", "--no-deps", "--use-tp-pp-dp-mapping",
    "--requeue", "--ntasks-per-node", "--tensor-parallel-size")  # fmt: skip
"""Flags of SLURM, pip and Megatron-LM that texts mention."""


def faults_of_translation(page: Page) -> list[str]:
    """Return differences in commands or heading levels between a Chinese page and its English twin."""
    twin = read_page(page.path.with_name(page.path.name.replace(f"{CHINESE}.md", ".md")))
    ours, theirs = ([*_commands(each), *(level for level, _ in each.headings)] for each in (page, twin))
    pairs = (pair for pair in zip_longest(ours, theirs) if pair[0] != pair[1])
    return page.told([(1, f"got {own!r}, the English page has {other!r}") for own, other in pairs][:1])


def _commands(page: Page) -> list[str]:
    """Return all blocks except output, without their comments, which are translated."""
    lines = "\n".join(f"{block.info}\n{block.text}" for block in page.blocks if block.info != "text")
    return [command for line in lines.splitlines() if (command := re.sub(r"(^|\s)#.*", "", line).rstrip())]


# Calls of bash.

_RECORDED = (
    "python", "python3", "llama-patch", "make", "pip", "torchrun", "srun", "sbatch", "salloc", "scancel",
    "squeue", "sinfo", "ssh", "scp", "rsync", "nvidia-smi", "vllm", "git", "tensorboard", "curl", "hf",
    "sleep", "tail", "watch", "kill", "py-spy", "apt-get", "module", "docker",
)  # fmt: skip
_TIMEOUT_S = 60

# File names begin with the time, so that they sort in the order of the calls.
_PROGRAM = """#!/bin/bash
name=${0##*/}
{ printf '%s\\0' "$GUIDE_LINE" "$PWD" "$#" "$name" "$@"; env -0; } >"$GUIDE_CALLS/$EPOCHREALTIME.$$"
"""
_PRELUDE = """unset BASH_ENV
set -eu
enable -n kill
trap 'export GUIDE_LINE=$LINENO' DEBUG
trap 'echo "line $GUIDE_LINE: ended with $?: $BASH_COMMAND" >&2' ERR
"""


class Call(NamedTuple):
    line: int
    folder: Path
    argv: list[str]
    """Arguments, including the program's name."""
    environ: dict[str, str]


def calls_of(page: Page, folder: Path, variables: dict[str, str]) -> tuple[list[Call], str]:
    """Run all bash blocks of a page in one bash; return the calls in order, and bash's complaints.

    Programs of `_RECORDED` come first on PATH. All other lines of the page are empty lines of the script, so
    that line numbers agree.

    Args:
        folder: a new folder for the programs. The blocks run in its `repository`, which links to the
            repository's files.
        variables: environment of the blocks.
    """
    programs, calls, root, home = (folder / name for name in ("bin", "calls", "repository", "home"))
    for place in (programs, calls, root / ".venv/bin", home):
        place.mkdir(parents=True)
    for name in _RECORDED:
        (programs / name).write_text(_PROGRAM)
        (programs / name).chmod(0o755)
    for entry in REPOSITORY.iterdir():  # files that blocks write beside them stay here
        if not entry.name.startswith("."):
            (root / entry.name).symlink_to(entry)
    (root / ".venv/bin/activate").touch()
    (folder / "prelude").write_text(_PRELUDE)
    lines: list[str] = []
    for block in page.blocks:
        if block.is_bash:
            lines += [""] * (block.line - 1 - len(lines)) + block.text.splitlines()
    script = folder / page.path.name
    script.write_text("\n".join(lines) + "\n")
    environ = {
        "PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(home), "LANG": "C.UTF-8",
        "BASH_ENV": str(folder / "prelude"), "GUIDE_CALLS": str(calls), "GUIDE_LINE": "0",
        "PYTHON": str(programs / "python"), **variables,
    }  # fmt: skip
    ended = subprocess.run(
        ["bash", str(script)], cwd=root, env=environ, capture_output=True, text=True, timeout=_TIMEOUT_S,
        check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    complaint = ended.stderr.replace(f"{folder}/", "").strip()
    made = [_read_call(file) for file in sorted(calls.iterdir())]
    return made, f"bash ended with {ended.returncode}: {complaint}" if ended.returncode else ""


def _read_call(file: Path) -> Call:
    texts = file.read_bytes().decode().split("\0")
    count = 4 + int(texts[2])
    environ = dict(text.split("=", 1) for text in texts[count:] if "=" in text)
    return Call(int(texts[0]), Path(texts[1]), texts[3:count], environ)


# Checks of calls.

_HERE = MachineFacts(cuda_devices=0, cpu_cores=2, host_memory_bytes=64 * 2**30)
"""Machine of blocks without plan=."""
_LAUNCHERS = ("run_mcore_llama.sh", "pretrain_llama.py", "slurm.sh", "toolkits/train/__main__.py")
_STARTERS = ("python", "python3", "torchrun", "srun", "sbatch", "pip")
_FILE = re.compile(r"(?!/)[\w./-]+\.(?:py|sh|txt)")
_RUN_HERE = ("convert", "plan", "preview_data", "inspect_checkpoint")
"""Fast tools, which really run if an argument names a fixture."""


class RefusedError(Exception):
    """A fault of a command."""


class _Read(BaseException):
    """Raised after a tool that must not run has parsed its arguments."""


def check(call: Call, block: Block, fixtures: Path) -> str:
    """Return the fault of a call, or "".

    Args:
        block: the block of the call.
        fixtures: folder that commands may read.
    """
    kind = KINDS.fullmatch(block.info)
    assert kind is not None, block
    variables = {name: value for name, value in call.environ.items() if name not in ("PATH", "PWD", "OLDPWD")}
    with chdir(call.folder), mock.patch.dict(os.environ, variables):
        try:
            _check(call, kind, str(fixtures))
        except (RefusedError, PatchError) as error:
            return user_message(error) if isinstance(error, PatchError) else str(error)
    return ""


def _check(call: Call, kind: re.Match, fixtures: str) -> None:
    """Check that named repository files exist, that a run can start, and that a tool parses its arguments."""
    name, *arguments = call.argv
    start = next((i for i, text in enumerate(arguments) if text.endswith(_LAUNCHERS)), None)
    named = arguments[: None if start is None else start + 1] if name in _STARTERS else ()
    for text in named:
        if _FILE.fullmatch(text) and not Path(text).is_file():
            raise RefusedError(f"there is no file {text}")
    if start is not None:
        _check_run(arguments[start + 1 :], call, kind)
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


def _check_run(argv: list[str], call: Call, kind: re.Match) -> None:
    """Check a run as the launcher does, plan it, and check that it fits."""
    if unknown := unknown_variables(call.environ):
        raise RefusedError(unknown[0])
    argv = [text for text in argv if text not in ("--dry-run", "--force")]
    planned = _plan_for(argv, call.environ, kind)
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


def _plan_for(argv: list[str], environ: dict[str, str], kind: re.Match) -> PlannedRun:
    """Plan the run on the machine that the block names, otherwise on CPUs."""
    if kind["machine"] is None:
        nodes = environ.get("WORLD_SIZE") if argv[:1] == ["dlc"] else None
        return plan_run(argv, "here", int(nodes) if nodes else None, environ=environ, here=_HERE)
    nodes, devices = int(kind["nodes"] or 1), int(kind["devices"])
    return plan_run(argv, kind["machine"], nodes, devices, environ=environ, here=_HERE)


def _check_tool(module: str, argv: list[str], call: Call, kind: re.Match, fixtures: str) -> None:
    name = module.removeprefix("toolkits.").removesuffix(".__main__")
    if name == "train":
        return _check_run(argv, call, kind)
    place = REPOSITORY / module.removesuffix(".__main__").replace(".", "/")
    if not module.startswith("toolkits.") or not (place.is_dir() or place.with_suffix(".py").is_file()):
        raise RefusedError(f"there is no tool {module}")
    runs = name == "plan" or (name in _RUN_HERE and any(fixtures in text for text in argv))
    program = f"toolkits.{name}.__main__" if place.is_dir() else f"toolkits.{name}"
    _call(program, argv, runs=runs)


def _call(module: str, argv: list[str], *, runs: bool) -> None:
    """Call a tool's `main`, or only let it parse its arguments."""
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
        raise RefusedError(f"{module} ended with {code}: {said.getvalue().strip()}")


@contextmanager
def _reading_only() -> Iterator[None]:
    """Within the context, a program ends after it has parsed its arguments."""
    read = argparse.ArgumentParser.parse_args

    def read_and_end(self: argparse.ArgumentParser, *arguments: object) -> None:
        read(self, *arguments)
        raise _Read

    with mock.patch.object(argparse.ArgumentParser, "parse_args", read_and_end):
        yield
