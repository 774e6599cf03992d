"""llama-patch inspect: what a checkpoint holds, whether it is whole, how two differ.

Builds no model and executes nothing that a checkpoint holds. Exit code 0: whole, and equal to the second;
1: whole, but they differ; 4: damaged, or no checkpoint.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkits._arguments import ArgumentParser, output_file, typed

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from patch.checkpoint.compare import Comparison
    from patch.checkpoint.inspect import Inspection

_WIDTH = 160
"""Columns where the output is no terminal."""


def main(argv: list[str]) -> int:
    """Run the command line; returns 0, 1 if two checkpoints differ, 4, or the exit code of another error."""
    options = _parse(argv)
    from patch.errors import CheckpointError, PatchError
    from patch.logger import configure_logging

    configure_logging()
    try:
        return _run(options.folders, options.json)
    except PatchError as error:
        print(f"ERROR {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:  # of a store
        print(f"ERROR {error}", file=sys.stderr)
        return CheckpointError.exit_code


def _run(folders: list[str], file: Path | None) -> int:
    from patch.checkpoint.compare import compare
    from patch.checkpoint.inspect import find_stored, inspect, num_bytes_of
    from patch.progress import progress
    from patch.storage.places import any_path

    report: dict[str, Any] = {"checkpoints": []}
    console, readers = _console(), []
    for load in folders:
        folder = find_stored(any_path(load))
        with progress(f"checking {folder.name}", num_bytes_of(folder)) as advance:
            inspection, reader = inspect(folder, advance)
        report["checkpoints"].append(inspection.as_json())
        readers.append(reader)
        _show(console, inspection)
    code = 4 if any(each["complaints"] for each in report["checkpoints"]) else 0
    if len(folders) == 2 and readers[0] is not None and readers[1] is not None and code == 0:
        total = sum(tensor.num_bytes for tensor in readers[0].tensors.values())
        with progress("comparing", total) as advance:
            comparison = compare(readers[0], readers[1], advance)
        report["comparison"] = comparison.as_json()
        _show_comparison(console, comparison)
        code = 0 if comparison.is_equal else 1
    if file is not None:
        file.write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")
    return code


def _console() -> Console:
    from rich.console import Console

    is_terminal = sys.stdout.isatty()
    return Console(width=None if is_terminal else _WIDTH, highlight=False, markup=False, emoji=False)


def _show(console: Console, inspection: Inspection) -> None:
    from patch.storage.sizes import size_text

    console.print(str(inspection.folder), style="bold")
    console.print(f"  format: {inspection.format}, saved {inspection.saved}")
    for name, value in inspection.facts.items():
        text = ", ".join(f"{key} {each}" for key, each in value.items()) if isinstance(value, dict) else value
        console.print(f"  {_visible(name)}: {_visible(str(text))}")
    table = _table("tensors", "shape", "type", "number", "size")
    groups: dict[str, int] = {}
    for each in inspection.tensors:
        shape = " x ".join(map(str, each.tensor.shape)) or "scalar"
        dtype = str(each.tensor.dtype).removeprefix("torch.")
        size = size_text(each.num_bytes)
        table.add_row(_visible(each.name), shape, dtype, str(each.num_tensors), size)
        groups[each.group] = groups.get(each.group, 0) + each.num_bytes
    if inspection.tensors:
        console.print(table)
    for group, num_bytes in groups.items():
        console.print(f"  {group}: {size_text(num_bytes)}")
    if inspection.num_objects:
        console.print(f"  and {inspection.num_objects} opaque objects, not read")
    _show_files(console, inspection)
    for target in inspection.loads_into:
        console.print(f"  loads into {target}")
    for other in inspection.neighbours:
        size, note = size_text(other.num_bytes), f" ({other.note})" if other.note else ""
        console.print(f"  in its folder: {_visible(other.name)}, {size}{note}", style="dim")


def _show_files(console: Console, inspection: Inspection) -> None:
    from patch.storage.sizes import size_text

    verified = [file for file in inspection.files if file.is_verified]
    if verified:
        whole = sum(file.complaint is None for file in verified)
        size = size_text(sum(file.num_bytes for file in verified))
        console.print(f"  checksums: {whole} of {len(verified)} files are what was saved, {size}")
    else:
        console.print("  checksums: it has none; the lengths of its files are checked")
    for complaint in inspection.complaints:
        console.print(f"  DAMAGED {_visible(complaint)}", style="bold red")


def _show_comparison(console: Console, comparison: Comparison) -> None:
    console.print("comparison", style="bold")
    console.print(f"  {comparison.num_equal} tensors are equal to the bit")
    table = _table("tensors that differ", "first", "second", "elements", "largest difference")
    for each in comparison.differences:
        sides = [f"{' x '.join(map(str, side.shape))} {str(side.dtype)[6:]}" for side in each[1:3]]
        table.add_row(_visible(each.name), *sides, str(each.num_different), f"{each.largest:.6g}")
    if comparison.differences:
        console.print(table)
    for which, names in (("first", comparison.only_first), ("second", comparison.only_second)):
        for name in names:
            console.print(f"  only in the {which}: {_visible(name)}")
    if comparison.common_values:
        console.print(f"  other values that differ: {_visible(', '.join(comparison.common_values))}")


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=True)
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold", justify="right" if number > 2 else "left")
    return table


def _visible(text: str) -> str:
    """Text of a file, without characters that move the cursor."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(prog=typed("python -m toolkits.inspect_checkpoint"), description=__doc__)
    parser.add_argument(
        "folder", metavar="DIR",
        help="a run's folder, its checkpoint/ or URL (--save), one checkpoint in it, a converted one, or "
        "one of Megatron-LM",
    )  # fmt: skip
    parser.add_argument(
        "second", nargs="?", metavar="DIR2", help="compare with this one, saved in any layout"
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write all of this as JSON")
    options = parser.parse_args(argv)
    options.folders = [folder for folder in (options.folder, options.second) if folder is not None]
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
