"""`llama-patch plan --schedule`: who computes what when in a pipeline, in the terminal and as SVG.

A row is a pipeline rank, a column a time slot. A forward takes one slot, a backward two, and all stages are
equal. Three schedules of the run's stages and micro-batches are drawn: 1F1B, interleaved 1F1B (with the run's
virtual stages, else the fewest that divide the layers), and all forwards before all backwards.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from patch.config import RunConfig
from patch.errors import ConfigError
from patch.plan.pipeline import Schedule, moments, simulate
from patch.text import counted
from toolkits._arguments import TABLE_WIDTH, console

if TYPE_CHECKING:
    from rich.console import Console

_COLOURS = {"F": ("#3b7dd8", "#1d4a8a"), "B": ("#58a65c", "#2b6b36")}
"""Colours of forwards and backwards, by even and odd virtual stages."""
_NAME = 9
"""Columns of the ranks' names."""


class Drawn(NamedTuple):
    """A pass in a rank's row."""

    begin: int
    """First time slot."""
    width: int
    label: str
    """Such as F3, or F3b in the second virtual stage; micro-batches are counted from 1."""
    colour: str


def drawings(config: RunConfig) -> dict[str, list[list[Drawn]]]:
    """Return the rows of each schedule by its title; the interleaved one only if stages can be cut further.

    Raises:
        ConfigError: the run has one stage.
    """
    own, of_stage = Schedule.of(config), config.model.num_layers // Schedule.of(config).pp_size
    if own.pp_size == 1:
        raise ConfigError("--schedule: got a run with PP 1, expected PP of at least 2 (position 11)")
    cuts = (n for n in range(2, of_stage + 1) if config.model.num_layers % (own.pp_size * n) == 0)
    plain, vp_size = own._replace(vp_size=1), own.vp_size if own.vp_size > 1 else next(cuts, 1)
    found = {"1F1B": plain, "interleaved 1F1B": own._replace(vp_size=vp_size)}
    if vp_size == 1 or own.num_micro_batches < own.pp_size:  # megatron-core has no such schedule
        del found["interleaved 1F1B"]
    found["all forward, all backward"] = plain._replace(all_forward=True)
    return dict(drawing(name, schedule) for name, schedule in found.items())


def drawing(name: str, schedule: Schedule) -> tuple[str, list[list[Drawn]]]:
    """Return the title of a schedule, with its idle share, and its rows."""
    pp_size, vp_size, count, *_ = schedule
    timing = simulate(schedule, [1.0] * pp_size * vp_size, [2.0] * pp_size * vp_size)
    rows: list[list[Drawn]] = [[] for _ in range(pp_size)]
    for rank, row in enumerate(rows):
        for is_forward, chunk, micro_batch in schedule.passes(rank):
            kind, width = ("F", 1) if is_forward else ("B", 2)
            end = int(timing.passes[is_forward, chunk * pp_size + rank, micro_batch])
            label = f"{kind}{micro_batch + 1}{'abcdefghijklmnopqrstuvwxyz'[chunk % 26] * (vp_size > 1)}"
            row.append(Drawn(end - width, width, label, _COLOURS[kind][chunk % 2]))
    sizes, formula = (f"VPP {vp_size} x ", "(p - 1) / (v m)") if vp_size > 1 else ("", "(p - 1) / m")
    kept = max(sum(in_flight) for _, _, in_flight in moments(schedule, 0)) / vp_size
    title = (
        f"{name}, PP {pp_size}, {sizes}{counted(count, 'micro-batch')}: stages idle {timing.bubble:.1%} of "
        f"their computing time; {formula} = {schedule.formula:.1%}; rank 0 keeps {kept:g} micro-batches"
    )
    return title, rows


def show(config: RunConfig, file: Path | None) -> None:
    """Print the schedules as far as the terminal is wide, in colour, and write all slots to `file` (SVG)."""
    found = drawings(config)
    _print(found, console())
    if file is not None:
        columns = max(_NAME + _cell(rows) * (rows[0][-1].begin + 2) for rows in found.values())
        _print(found, whole := console(width=max(TABLE_WIDTH, columns), record=True, file=io.StringIO()))
        whole.save_svg(str(file), title="llama-patch plan --schedule")


def _cell(rows: list[list[Drawn]]) -> int:
    """Return the columns of a time slot."""
    return 1 + max(len(drawn.label) for drawn in rows[0])


def _print(found: dict[str, list[list[Drawn]]], console: Console) -> None:
    from rich.text import Text

    for title, rows in found.items():
        console.print(f"\n{title}", soft_wrap=True)
        cell, slots = _cell(rows), rows[0][-1].begin + rows[0][-1].width
        shown = (console.width - _NAME) // cell
        for rank, row in enumerate(rows):
            line = Text(f"rank {rank}")
            for begin, width, label, colour in row:
                if begin + width <= shown:
                    line.append(" " * (_NAME + begin * cell - len(line)))
                    line.append(label.ljust(width * cell - 1, " -"[width - 1]), style=f"white on {colour}")
            console.print(line)
        if slots > shown:
            console.print(f"the first {shown} of {slots} slots; --schedule FILE.svg has all of them")
