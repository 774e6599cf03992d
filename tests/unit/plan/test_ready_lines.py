"""The pages of ready lines and parallelism: by plan each line fits its machine, with the figures of the page.

`RENEW_GOLDEN=1` writes the plan's figures into the pages.
"""

import os
import re
import shlex
from functools import partial
from pathlib import Path
from string import Template

import pytest
from guides import KINDS
from planned_runs import H100
from proofs import prove_all, shrunk

from patch.plan.fits import fit_of
from patch.plan.planned_run import PlannedRun, plan_run
from patch.plan.timing.step_time import step_time

GUIDES = Path(__file__).parents[3] / "docs"
PAGES = {GUIDES / "ready_lines.md": 60, GUIDES / "parallelism.md": 8}
"""With a number of figures of which each has more."""
FIGURES = re.compile(r"(?:[\d.]+ GiB, )?[\d.]+ s, MFU [\d.]+ %")
"""A table leaves out memory that is equal to that of the line."""
LABEL = re.compile(r"# (.*?)[:：]")
ALONE = re.compile(r"(\w+), (\d+) tokens, (\d+) GPUs?")
"""A row's label that no line has: flags are all of the run."""
SCRIPTS = ("run_mcore_llama.sh", "slurm.sh")
PLANNED: list[PlannedRun] = []
"""All runs that `figures` has planned."""
PATHS = dict.fromkeys(("MODEL", "DATA", "CORPUS", "RUN"), "/nowhere")


def figures(
    argv: list[str], environ: dict[str, str], nodes: int, devices: int, machine: str, more: str = ""
) -> str:
    """Memory, seconds and MFU of a launcher line by plan, with more flags."""
    argv = [*argv, *more.split()]
    planned = plan_run(argv, machine, nodes, devices, environ=environ, here=H100.facts)
    PLANNED.append(planned)
    fit = fit_of(planned.resolved, planned.machine.facts)
    assert fit.is_whole, (machine, argv)
    time = step_time(planned.resolved, planned.machine)
    assert time.mfu is not None
    seconds = f"{time.seconds:.3g}" if time.seconds < 100 else f"{time.seconds:.0f}"
    return f"{fit.device_needed / 2**30:.1f} GiB, {seconds} s, MFU {100 * time.mfu:.1f} %"


def line_of(command: str, block: re.Match[str]) -> partial[str]:
    """`figures` of a line on the nodes that its block names, without the machine."""
    words = shlex.split(Template(command).substitute(PATHS))
    start = next(index for index, word in enumerate(words) if word.endswith(SCRIPTS))
    environ = dict(word.split("=", 1) for word in words[:start] if re.match(r"[A-Z_]+=", word))
    nodes = int(block["nodes"] or 1)
    if "--nodes" in words[:start]:
        assert words[words.index("--nodes") + 1] == str(nodes)
    return partial(figures, words[start + 1 :], environ, nodes, int(block["devices"]))


def run_of(label: str) -> partial[str]:
    """`figures` of a row that is alone: a run of this model on so many GPUs."""
    model, tokens, devices = ALONE.fullmatch(label).groups()
    nodes = -(-int(devices) // 8)
    argv = ["--model-size", model, "--seq-length", tokens]
    return partial(figures, argv, {}, nodes, int(devices) // nodes)


def with_plan(text: str) -> tuple[str, int]:
    """The page with the plan's figures, and how many it has."""
    block, command, at = None, "", 0
    lines, named, columns = text.split("\n"), {}, []
    for index, line in enumerate(lines):
        if line.startswith("#") and block is None:
            named = {}
        elif line.startswith("```"):
            block = KINDS.fullmatch(line, 3)
            has_figures = block and block["machine"] and FIGURES.search(lines[index + 1])
            block = block if has_figures else None
        elif block and FIGURES.search(line):
            at = index
        elif block:
            command += line.removesuffix("\\")
            if command and not line.endswith("\\"):
                found = line_of(command, block)
                label = LABEL.match(lines[at])
                assert label is not None and FIGURES.search(lines[at]), command
                planned, command = found(block["machine"]), ""
                named[label[1]] = found, planned[: planned.index("GiB,") + 4]
                lines[at] = FIGURES.sub(planned, lines[at])
        elif re.match(r"\| .* \| [AH]\d00 ", line):
            columns = [cell.split()[0].lower() for cell in line.strip("| ").split("|")[1:]]
        elif line.startswith("|") and FIGURES.search(line):
            label, *cells = (cell.strip() for cell in line.strip("| ").split("|"))
            found, memory = named.get(label) or (run_of(label), "no memory")
            for column, cell in enumerate(cells):
                more = re.match("`(.*)`", cell)
                planned = found(columns[column], more[1] if more else "").removeprefix(f"{memory} ")
                cells[column] = FIGURES.sub(planned, cell)
            lines[index] = f"| {label} | {' | '.join(cells)} |"
    return "\n".join(lines), sum(len(FIGURES.findall(line)) for line in lines)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
@pytest.mark.long
def test_figures_of_ready_lines_are_the_plans(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    planned, number = with_plan(text)
    if os.environ.get("RENEW_GOLDEN"):
        page.write_text(planned, encoding="utf-8")
        return
    assert number > PAGES[page]
    for ours, plan in zip(text.split("\n"), planned.split("\n"), strict=True):
        assert ours == plan


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_ready_lines_are_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many of them have the same small run."""
    monkeypatch.setitem(PATHS, "RUN", str(tmp_path))  # one has states in it
    PLANNED.clear()
    for page in PAGES:
        with_plan(page.read_text(encoding="utf-8"))
    runs = {shrunk(each.resolved, tmp_path, is_for_gpus=True).layout: each.resolved for each in PLANNED}
    small = [shrunk(run, tmp_path / str(n), is_for_gpus=True) for n, run in enumerate(runs.values())]
    assert len(small) > 20
    assert not prove_all(small)


def test_front_pages_have_the_memory_of_the_ready_lines() -> None:
    planned = re.findall(r"SFT: ([\d.]+ GiB)", (GUIDES / "ready_lines.md").read_text(encoding="utf-8"))
    for front in ("README.md", "README_zh.md"):
        text = (GUIDES.parent / front).read_text(encoding="utf-8")
        assert set(re.findall(r"\| ([\d.]+ GiB)", text)) <= set(planned), front
